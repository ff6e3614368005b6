"""Checks that recipes and examples give the numbers that are recorded, on whatever machine and version this is."""

from pathlib import Path

import pytest

from tests.golden import FOLDER, RUNS
from trainer.base.run_files.job_files import read_json
from trainer.base.settings.request import resolve
from trainer.checks.golden_file import CHANGED, compare_with_golden, read_golden
from trainer.checks.golden_run import measure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replicas"), [(name, 1 if "efficientnet" in name else 1 + at % 2) for at, name in enumerate(RUNS)]
)
def test_the_numbers_are_those_that_were_recorded(name: str, replicas: int, tmp_path: Path) -> None:
    """Every other run, of a network of fewer layers, on 2 replicas, which gives what 1 gave up to rounding.

    tests/trainer/checks/test_golden.py has the command.
    """
    golden = read_golden(FOLDER / f"{name}.json")
    measure(resolve(golden.flags).config, golden.steps, replicas, tmp_path / "measured.json", control=False)
    verdict = compare_with_golden(golden, read_json(tmp_path / "measured.json")[0])
    assert verdict.kind != CHANGED, verdict
