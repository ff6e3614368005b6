"""Checks that recipes and examples give the numbers that are recorded, on whatever machine and
version this is."""

from tests.fixtures import SLOW, parametrize
from tests.golden import FOLDER, RUNS
from tests.golden.comparison import compare
from tests.golden.measuring import measure
from trainer.base.run_files.job_files import read_json


@SLOW
@parametrize(
    "name, replicas",
    [(name, 1 if "efficientnet" in name else 1 + at % 2) for at, name in enumerate(RUNS)],
)
def test_the_numbers_are_those_that_were_recorded(name: str, replicas: int) -> None:
    """Every other run, of a network of fewer layers, on 2 replicas, which gives what 1 gave up to
    rounding."""
    golden, problem = read_json(FOLDER / f"{name}.json")
    assert not problem
    assert compare(golden, measure(golden["flags"], golden["steps"], replicas)) == ""
