"""Tests what is warned about or added before a job is sent: regions, ended support, networks of several machines."""

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.tiers.availability import NoMachines, check_region, multi_regional
from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.job_checks import warnings_of_script
from deploy.tiers.job_spec import NCCL_SETTINGS, use_rdma
from deploy.tiers.tier import Tier, load_tier
from tests.deploy.cli.wrong_inputs import GOOD, TWO

_L4 = "g2-standard-48, acceleratorType: NVIDIA_L4, acceleratorCount: 4"
_H200 = "a3-ultragpu-8g, acceleratorType: NVIDIA_H200_141GB, acceleratorCount: 8"


def tier_of(folder: Path, content: str) -> Tier:
    file = folder / "tier.yaml"
    file.write_text(content)
    return load_tier(str(file))


@pytest.mark.parametrize(
    ("tier", "region", "page"),
    [("t4x1", "us-central1", ""), ("t4x1", "us-west4", "locations"), ("v100x1", "us-east1", "locations"),
     ("l4x1", "europe-west2", "locations")],
)  # fmt: skip
def test_a_region_that_one_page_alone_has_is_a_warning(tier: str, region: str, page: str) -> None:
    warned = list(check_region(load_tier(tier), GcpConfig("p", region, "gs://abc")))
    assert len(warned) == bool(page)
    assert all(f"region={region}: only Google's page of {page} has" in line for line in warned)


def test_a_region_that_no_page_has_is_refused_and_the_other_page_counts_too(tmp_path: Path) -> None:
    with pytest.raises(NoMachines, match=r"region=africa-south1 has no NVIDIA_L4 .*europe-west2"):
        list(check_region(load_tier("l4x1"), GcpConfig("p", "africa-south1", "gs://abc")))
    p100 = tier_of(
        tmp_path, GOOD.replace(_L4, "n1-standard-8, acceleratorType: NVIDIA_TESLA_P100, acceleratorCount: 1")
    )
    (warned,) = check_region(p100, GcpConfig("p", "australia-southeast1", "gs://abc"))
    assert "only Google's page of quotas" in warned
    assert "NVIDIA_TESLA_P100: Google's support of it ended on 2026-09-15" in "".join(warnings_of_script(p100))


def test_experiments_of_several_workers_and_buckets_of_several_regions_are_warned_about(tmp_path: Path) -> None:
    tracked = "\nexperiment: projects/p/locations/us-central1/metadataStores/default/contexts/e\nworkerPoolSpecs"
    for content, warned in ((GOOD, False), (TWO, True)):
        lines = "".join(warnings_of_script(tier_of(tmp_path, content.replace("\nworkerPoolSpecs", tracked, 1))))
        assert ("autologging is not for jobs of several workers" in lines) == warned
    assert [bool([*multi_regional("gs://abc", place)]) for place in ("US", "NAM4", "EUROPE-WEST4", "")] == [1, 1, 0, 0]


def test_workers_with_rdma_source_googles_settings_before_their_command(tmp_path: Path) -> None:
    task = "containerSpec: {imageUri: p/x, command: [printenv], args: [NCCL_NET]}"
    content = TWO.replace("pythonPackageSpec: {pythonModule: trainer.task}", task)
    settings = tmp_path / "set_nccl_env.sh"
    settings.write_text("export NCCL_NET=gIB\n")
    for machines, wrapped in ((_L4, False), (_H200, True)):
        tier = tier_of(tmp_path, content.replace(_L4, machines).replace("pd-ssd", "hyperdisk-balanced"))
        spec: dict[str, Any] = copy.deepcopy(dict(tier.spec))
        use_rdma(spec, tier, str(settings))
        containers = [pool["containerSpec"] for pool in spec["workerPoolSpecs"]]
        assert [container["command"] != ["printenv"] for container in containers] == [wrapped] * 2
    container = containers[1]
    run = [*container["command"], *container["args"]]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.split("\n")[1] == "gIB"
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]
    settings.unlink()
    without = subprocess.run(run, capture_output=True, text=True, check=False)
    assert without.stdout == f"NCCL: {settings} is not in this image: RDMA stays off\n"
    assert NCCL_SETTINGS.startswith("/usr/local/gib/")
