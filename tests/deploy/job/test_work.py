"""Tests what is refused or warned about before a job is sent: regions."""

import pytest

from deploy.tiers.gcp_config import GcpConfig, NoMachines, check_region
from deploy.tiers.tier import load_tier


def test_a_region_that_no_page_has_is_refused_and_one_page_is_enough() -> None:
    for tier, region in (("t4x1", "us-central1"), ("v100x1", "us-east1"), ("l4x1", "europe-west2"), ("cpu", "x")):
        check_region(load_tier(tier), GcpConfig("p", region, "gs://abc"))
    with pytest.raises(NoMachines, match=r"region=africa-south1 has no NVIDIA_L4 .*europe-west2"):
        check_region(load_tier("l4x1"), GcpConfig("p", "africa-south1", "gs://abc"))
