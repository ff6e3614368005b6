"""A dozen of the drawn models are proved, and what mixes rows from step 200 on is not."""

import pytest

from benchmarks.drawn_models import MODELS, config_of, difference
from trainer.run.replica_check import proof_of

# Some draw an embedding with a mask before a layer that takes none, as users' models do.
pytestmark = pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")


@pytest.mark.slow
@pytest.mark.parametrize("number", [*range(9), 18, 27, 32])
def test_drawn_models_are_proved(number: int) -> None:
    proof = proof_of(config_of(number))
    assert proof.holds, proof


@pytest.mark.slow
@pytest.mark.parametrize("number", [MODELS, MODELS + 1, MODELS + 2])
def test_what_mixes_rows_from_step_200_on_is_not_proved(number: int) -> None:
    assert not proof_of(config_of(number)).holds


@pytest.mark.slow
def test_a_proved_model_has_the_same_weights_on_two_replicas() -> None:
    assert difference(config_of(0), 20) < 1e-9
