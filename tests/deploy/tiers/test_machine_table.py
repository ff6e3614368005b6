"""The table of machines, a user's prices over it, and the comments of job_configs/ that quote
it."""

import re
from functools import partial
from pathlib import Path

import pytest

from deploy.job.cost import price_and_limit
from deploy.job.options import JobOptions
from deploy.job.spec import machine_spec
from deploy.tiers.machine_table import Price, load_machines
from deploy.tiers.spec_rules import ENUMS
from deploy.tiers.tier import JOB_CONFIGS, load_tier, machine_tier
from tests.support import refused
from trainer.base.settings.accelerators import TFLOPS, accelerator_of, peak_tflops
from trainer.base.settings.train_config import TrainConfig


def test_every_accelerator_is_one_that_vertex_names_and_some_machine_has() -> None:
    table = load_machines()
    offered = {name for machine in table.machines.values() for name in machine.counts}
    assert offered == set(table.accelerators)
    assert set(TFLOPS) <= offered <= set(ENUMS["AcceleratorType"])


TIERS_PAGE = (JOB_CONFIGS.parent / "docs" / "tiers.md").read_text("utf-8")


@pytest.mark.parametrize("path", sorted(JOB_CONFIGS.glob("*.yaml")))
def test_the_price_of_a_tier_stands_in_its_file_and_on_the_page(path: Path) -> None:
    """tests/deploy/job/golden/ has it, too."""
    tier = load_tier(str(path))
    for pool in tier.spec["workerPoolSpecs"]:
        machine = load_machines().machines[pool["machineSpec"]["machineType"]]
        assert pool["diskSpec"]["bootDiskType"] == machine.disk
    assert tier.price.inferred
    quoted = f"{tier.price_per_hour:.2f}"
    assert f"# About {quoted} USD an hour" in path.read_text()
    assert re.search(rf"(?m)^\| .*`{path.stem}`.* {re.escape(quoted)}\b", TIERS_PAGE)


def test_machines_without_accelerators_have_the_prices_of_the_source() -> None:
    for name, listed, spot, gb in (
        ("n2-highmem-64", 6.28867 * 64 / 96, 2.71162 * 64 / 96, 512),
        ("n4-highcpu-32", 1.22464, 0.576, 64),
        ("m1-megamem-96", 10.65216, 1.96294, 1433.6),
    ):
        machine = load_machines().machines[name]
        assert machine.memory_gb == pytest.approx(gb, abs=0.01)
        assert machine.price.list == pytest.approx(1.15 * listed, rel=1e-4)
        assert machine.price.spot == pytest.approx(spot + 0.15 * listed, rel=1e-4)
    # a boot disk of 100 GB
    usd = 1.15 * 10.65216 + 17 / 730
    assert machine_tier("m1-megamem-96", "").most_usd == pytest.approx(24 * usd, rel=1e-4)


def disk(name: str) -> float:
    return 100 * (0.08 if name.startswith("n4") else 0.17)


def test_by_flex_start_an_h100_is_dearer_and_without_a_list_price_a_price_is_a_bound() -> None:
    h100, a100 = (load_tier(name).price_per_hour for name in ("h100x1", "a100-80x1"))
    assert h100 > a100
    t4 = load_machines().price("n1-standard-8", "NVIDIA_TESLA_T4", 1)
    assert t4.spot == pytest.approx(0.10446 + 0.1915 + 0.15 * (0.38 + 0.35))
    on_spot = partial(machine_spec, JobOptions(spot=True))
    spot = machine_tier("a3-megagpu-8g", "NVIDIA_H100_MEGA_80GB:8", "", on_spot)
    assert f"the spot price of {spot.machine} is not known (--prices=F" in price_and_limit(spot)
    b200 = load_machines().price("a4-highgpu-8g", "NVIDIA_B200", 8)
    assert b200.list is None
    assert b200.flex_start == 64.44
    assert b200.lower_bound
    text = (JOB_CONFIGS / "h100x8.yaml").read_text().replace("a3-highgpu-8g", "a4-highgpu-8g")
    text += '  strategy: FLEX_START\n  maxWaitDuration: "14400s"\n'
    Path("b200.yaml").write_text(text.replace("NVIDIA_H100_80GB", "NVIDIA_B200"))
    tier = load_tier("b200.yaml")
    # no limit, label or cost rests on a bound
    assert tier.price_per_hour is None
    assert tier.most_usd is None
    assert " is not known (at least 64.46 USD an hour, and Vertex AI's" in price_and_limit(tier)


def test_a_price_file_replaces_and_extends() -> None:
    lines = [
        "g2-standard-48: {list: 5, spot: 2}",
        "NVIDIA_TESLA_T4: 1",
        "n1-standard-8: 2",
        "a2-highgpu-1g: 3",
    ]
    Path("prices.yaml").write_text("\n".join([*lines, "n2-standard-8: 0.5"]))
    table = load_machines("prices.yaml")
    mine = table.price("g2-standard-48", "NVIDIA_L4", 4)
    assert mine.list == 5
    assert mine.spot == 2
    assert not mine.inferred
    assert table.price("n1-standard-8", "NVIDIA_TESLA_T4", 2).list == 4
    # The table's spot is not mixed with it.
    assert table.price("a2-highgpu-1g", "NVIDIA_TESLA_A100", 1) == Price(list=3)
    assert table.price("n2-standard-8", "", 0).list == 0.5
    assert table.price("g2-standard-24", "NVIDIA_L4", 2) == load_machines().price(
        "g2-standard-24", "NVIDIA_L4", 2
    )


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("g2-standrd-48: 5", "unknown machine type or accelerator; did you mean 'g2-standard-48'?"),
        ("g2-standard-48: cheap", "'cheap' is not a price: use a number above 0, in USD an hour"),
        ("g2-standard-48: true", "True is not a price"),
        ("g2-standard-48: {liste: 5}", "liste: unknown price; use one of list, spot, flex_start"),
        ("- 5", "'setting: value' lines are needed"),
    ],
)
def test_a_wrong_price_file_is_refused(content: str, line: str) -> None:
    Path("prices.yaml").write_text(content)
    with refused(line):
        load_machines("prices.yaml")


@pytest.mark.parametrize(
    ("gpu", "name", "tflops"),
    [
        ("NVIDIA L4", "NVIDIA_L4", 60),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA_TESLA_A100", 156),
        ("NVIDIA H100 80GB HBM3", "NVIDIA_H100_80GB", 494),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA_H100_80GB", 0),
        ("NVIDIA L40S", "NVIDIA L40S", 0),
    ],
)
def test_what_a_gpu_calls_itself_is_an_accelerator_with_a_rate_or_none(
    gpu: str, name: str, tflops: float
) -> None:
    """Half of a card has not half of its rate, and float64 has other units: their rates are not
    known."""
    assert accelerator_of(gpu) == accelerator_of(gpu, load_machines().accelerators) == name
    assert peak_tflops(gpu, TrainConfig(tf32=True)) == tflops
    assert peak_tflops(gpu, TrainConfig(precision="float64")) == 0
