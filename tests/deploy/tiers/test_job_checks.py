"""Tests what is refused or warned about before a job is sent: regions, ended support."""

from pathlib import Path

import pytest

from deploy.tiers.availability import NoMachines, check_region
from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.job_checks import warnings_of_script
from deploy.tiers.tier import load_tier
from tests.deploy.cli.wrong_inputs import GOOD

_L4 = "g2-standard-48, acceleratorType: NVIDIA_L4, acceleratorCount: 4"


def test_a_region_that_no_page_has_is_refused_and_one_page_is_enough() -> None:
    for tier, region in (("t4x1", "us-central1"), ("v100x1", "us-east1"), ("l4x1", "europe-west2"), ("cpu", "x")):
        check_region(load_tier(tier), GcpConfig("p", region, "gs://abc"))
    with pytest.raises(NoMachines, match=r"region=africa-south1 has no NVIDIA_L4 .*europe-west2"):
        check_region(load_tier("l4x1"), GcpConfig("p", "africa-south1", "gs://abc"))


def test_the_end_of_googles_support_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "tier.yaml"
    file.write_text(GOOD.replace(_L4, "n1-standard-8, acceleratorType: NVIDIA_TESLA_P100, acceleratorCount: 1"))
    said = "".join(warnings_of_script(load_tier(str(file))))
    assert "NVIDIA_TESLA_P100: Google's support of it ended on 2026-09-15" in said
