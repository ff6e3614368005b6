"""Some of the drawn scripts do what `fit` does, on one replica and on two; others are proved,
planted ones not."""

import pytest

from benchmarks.drawn_models import MODELS, TOLERANCE, compared
from tests.fixtures import Patch
from trainer.run.proof import PROVED
from trainer.run.replica_check import SKIP

# Some draw an embedding with a mask before a layer that takes none, as users' models do.
pytestmark = pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")


# the quickest of each kind
QUICK = (13, 39, 68, 74, 85, 87)
OTHERS = [pytest.param(number, marks=pytest.mark.slow) for number in (6, 9, 25, 59, 60, 76)]


@pytest.mark.parametrize("number", [*QUICK, *OTHERS])
def test_a_drawn_script_does_what_fit_does(number: int) -> None:
    difference, _ = compared(number, 2)
    assert difference < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("number", [*range(6), 17, 21, 110, 120])
def test_drawn_scripts_are_proved(number: int, monkeypatch: Patch) -> None:
    monkeypatch.delenv(SKIP)
    difference, verdict = compared(number, 2)
    assert difference < TOLERANCE
    assert verdict == PROVED


@pytest.mark.slow
@pytest.mark.parametrize("number", [MODELS, MODELS + 1, MODELS + 2])
def test_what_mixes_rows_from_a_step_on_is_not_proved(number: int, monkeypatch: Patch) -> None:
    monkeypatch.delenv(SKIP)
    assert compared(number, 2)[1] != PROVED
