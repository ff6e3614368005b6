"""Checks that recipes and examples give the numbers that are recorded, on whatever machine and version this is."""

import pytest

from tests.fixtures import Capture
from tests.golden import FOLDER, RUNS
from trainer import golden
from trainer.base.errors import DONE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "replicas"), [(name, 1 + at % 2) for at, name in enumerate(RUNS)])
def test_the_numbers_are_those_that_were_recorded(name: str, replicas: int, capsys: Capture) -> None:
    """Every other run on 2 replicas, which gives what 1 gave up to rounding."""
    code = golden.main(["check", str(FOLDER / f"{name}.json"), f"--replicas={replicas}"])
    assert code == DONE, capsys.readouterr().err
