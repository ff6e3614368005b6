"""Checks that recipes and examples give the numbers that are recorded, on whatever machine and version this is."""

import pytest

from tests.fixtures import Capture
from tests.golden import FOLDER, RUNS
from trainer import golden
from trainer.base.errors import DONE
from trainer.proofs.golden_file import read_golden


def test_each_run_has_a_file_of_few_kilobytes() -> None:
    for name, flags in RUNS.items():
        file = FOLDER / f"{name}.json"
        recorded = read_golden(file)
        assert set(flags) <= set(recorded.flags), f"{name}: record it anew (python -m tests.golden {name})"
        assert file.stat().st_size <= max(50_000, 1_000 * len(recorded.sizes)), name
    assert {file.stem for file in FOLDER.glob("*.json")} == {*RUNS}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "replicas"), [(name, 1 + at % 2) for at, name in enumerate(RUNS)])
def test_the_numbers_are_those_that_were_recorded(name: str, replicas: int, capsys: Capture) -> None:
    """Every other run on 2 replicas, which gives what 1 gave up to rounding."""
    code = golden.main(["check", str(FOLDER / f"{name}.json"), f"--replicas={replicas}"])
    assert code == DONE, capsys.readouterr().err
