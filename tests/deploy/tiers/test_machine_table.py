"""The table of machines, a user's prices over it, and the comments of job_configs/ that quote it."""

import re
from pathlib import Path

import pytest
import yaml

from deploy.__main__ import main
from deploy.tiers.machine_table import TABLE, Price, accelerator_of, load_machines
from deploy.tiers.spec_rules import ENUMS
from deploy.tiers.tier import JOB_CONFIGS, load_tier
from tests.deploy.conftest import Capture, Command
from trainer.base.errors import UserError


def test_every_accelerator_is_one_that_vertex_names_and_some_machine_has() -> None:
    table = load_machines()
    offered = {name for machine in table.machines.values() for name in machine.counts}
    assert offered == set(table.accelerators)
    assert offered <= set(ENUMS["AcceleratorType"])


def test_prices_are_those_of_compute_engine_times_the_factor_and_marked_so() -> None:
    facts = yaml.safe_load(TABLE.read_text())
    factor = facts["prices"]["vertex_factor"]
    l4x4 = load_machines().price("g2-standard-48", "NVIDIA_L4", 4)
    assert l4x4.list == pytest.approx(facts["accelerator_machines"]["g2-standard-48"]["price"]["list"] * factor)
    host, gpu = facts["host_machines"]["n1-standard-32"], facts["accelerators"]["NVIDIA_TESLA_T4"]
    t4x4 = load_machines().price("n1-standard-32", "NVIDIA_TESLA_T4", 4)
    assert t4x4.list == pytest.approx((host["price"]["list"] + 4 * gpu["price"]["list"]) * factor)
    assert (l4x4.inferred, t4x4.inferred) == (True, True)
    assert t4x4.spot is None  # the spot price of the host is not known


def test_a_price_file_replaces_and_extends(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    lines = ["g2-standard-48: {list: 5, spot: 2}", "NVIDIA_TESLA_T4: 1", "n1-standard-8: 2", "a2-highgpu-1g: 3"]
    file.write_text("\n".join([*lines, "n2-standard-8: 0.5"]))
    table = load_machines(str(file))
    mine = table.price("g2-standard-48", "NVIDIA_L4", 4)
    assert (mine.list, mine.spot, mine.inferred) == (5, 2, False)
    assert table.price("n1-standard-8", "NVIDIA_TESLA_T4", 2).list == 4
    assert table.price("a2-highgpu-1g", "NVIDIA_TESLA_A100", 1) == Price(
        list=3
    )  # the table's spot is not mixed with it
    assert table.price("n2-standard-8", None, 0).list == 0.5
    assert table.price("g2-standard-24", "NVIDIA_L4", 2) == load_machines().price("g2-standard-24", "NVIDIA_L4", 2)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("g2-standrd-48: 5", "unknown machine type or accelerator; did you mean 'g2-standard-48'?"),
        ("g2-standard-48: cheap", "'cheap' is not a price: use a number, in USD an hour"),
        ("g2-standard-48: true", "True is not a price"),
        ("g2-standard-48: {liste: 5}", "liste: unknown price; use one of list, spot, flex_start"),
        ("- 5", "'setting: value' lines are needed"),
    ],
)
def test_a_wrong_price_file_is_refused(tmp_path: Path, content: str, line: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=re.escape(line)):
        load_machines(str(file))


def test_the_verb_prints_what_is_asked_for(capsys: Capture) -> None:
    assert main(["machines", "--accelerator=l4", "--count=4"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["g2-standard-48", "NVIDIA_L4", "4", "24", "48", "192", "~4.60", "~2.35"]
    assert shown[2] == ""
    assert "us-central1" in shown[-1]
    assert main(["machines", "--count=0"]) == 0
    assert "NVIDIA" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA L4", "NVIDIA_L4"),
        ("Tesla T4", "NVIDIA_TESLA_T4"),
        ("Tesla V100-SXM2-16GB", "NVIDIA_TESLA_V100"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA_TESLA_A100"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA_A100_80GB"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA_H100_80GB"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_what_a_gpu_calls_itself_is_an_accelerator_or_none(gpu: str, name: str) -> None:
    assert accelerator_of(gpu) == name


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--accelerator=L5"], "unknown accelerator"),
        (["--accelerator=L4", "--count=3"], "no machine has that many L4"),
        (["--prices=none.yaml"], "not found: write lines such as"),
    ],
)
def test_the_verb_refuses_in_one_line(flags: list[str], line: str, refused: Command) -> None:
    assert line in refused("machines", *flags)


@pytest.mark.parametrize("path", sorted(JOB_CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_comment_of_a_tier_quotes_the_table(path: Path) -> None:
    tier, table = load_tier(str(path)), load_machines()
    comment = path.read_text().split("workerPoolSpecs")[0]
    assert f"About {tier.price_per_hour:.2f} USD an hour" in comment
    assert f"estimate of {table.date}, {table.region}" in comment
    machine = table.machines[tier.machine_type]
    assert f"{machine.name} ({machine.vcpus} vCPUs, {machine.memory_gb:g} GB)" in comment
    if tier.accelerator_type:
        memory = table.accelerators[tier.accelerator_type].memory_gb
        assert f"{tier.accelerators} x {tier.accelerator_type} of {memory} GB" in comment
