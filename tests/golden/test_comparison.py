"""Tests how the numbers of a run are compared with those of a golden file."""

from typing import Any

from numpy.random import default_rng

from tests.fixtures import parametrize
from tests.golden.comparison import compare, moment

STEPS = [1, 2]
SIZES = [600, 3]


def content(
    change: float = 0.0, small: float = 0.0, loss: float = 1.0, sizes: Any = SIZES
) -> dict[str, Any]:
    """Returns what measuring leaves of a run, of whose large and small tensor a number is
    changed."""
    draw = default_rng(0)
    tensors = {"kernel": draw.normal(size=SIZES[0]), "bias": draw.normal(size=SIZES[1])}
    tensors["kernel"][17] += change
    tensors["bias"][1] += small
    moments = {str(step): moment(tensors, {"loss": loss}) for step in STEPS}
    return {"names": ["kernel", "bias"], "sizes": sizes, "moments": moments}


@parametrize(
    "measured, where",
    [
        (content(), ""),
        (content(change=1e-13), ""),
        (content(change=1e-4), "step 1: kernel"),
        (content(small=1e-8), "step 1: bias"),
        (content(loss=1.0 + 1e-12), ""),  # other replicas add it in another order
        (content(loss=1.001), "step 1: a loss or metric"),
        (content(sizes=[600, 4]), "sizes"),
    ],
)
def test_a_change_is_told_with_its_place(measured: dict[str, Any], where: str) -> None:
    control = {str(step): {"tensors": [1e-12, 1e-13], "losses": 1e-13} for step in STEPS}
    golden = {**content(), "steps": STEPS, "learning_rate": 1e-9, "control": control}
    found = compare(golden, measured)
    assert found.startswith(where)
    assert bool(found) == bool(where)
