"""Tests how the numbers of a run are compared with those of a golden file."""

from typing import Any

import pytest
from numpy.random import default_rng

from tests.golden.comparison import CHANGED, EQUAL, ROUNDING, compare, moment

STEPS = [1, 2]
SIZES = [600, 3]


def tensors(change: float = 0.0) -> dict[str, Any]:
    """Returns two tensors, the first of which has one number changed."""
    draw = default_rng(0)
    large = draw.normal(size=SIZES[0])
    small = draw.normal(size=SIZES[1])
    large[17] += change
    return {"kernel": large, "bias": small}


def content(change: float = 0.0, loss: float = 1.0, **other: Any) -> dict[str, Any]:
    """Returns what measuring leaves of a run."""
    moments = {str(step): moment(tensors(change), {"loss": loss}) for step in STEPS}
    return {"names": ["kernel", "bias"], "sizes": SIZES, "moments": moments, **other}


def recorded() -> dict[str, Any]:
    """Returns the content of a golden file."""
    measured = content()
    digests = {step: value["digest"] for step, value in measured["moments"].items()}
    control = {str(step): {"tensors": [1e-12, 1e-13], "losses": 1e-13} for step in STEPS}
    about = {"flags": ["--recipe=x"], "steps": STEPS, "learning_rate": 1e-9}
    return {**about, **measured, "control": control, "digests": {"avx2": digests}}


@pytest.mark.parametrize(
    ("measured", "kind", "step", "where"),
    [
        (content(), EQUAL, 0, ""),
        (content(change=1e-13), ROUNDING, 0, ""),
        (content(change=1e-4), CHANGED, 1, "kernel"),
        (content(loss=1.0 + 1e-12), EQUAL, 0, ""),  # other replicas add it in another order
        (content(loss=1.001), CHANGED, 1, "a loss or metric"),
        (content(sizes=[600, 4]), CHANGED, 1, "sizes"),
        (content(sizes=[600, 3, 3]), CHANGED, 1, "sizes"),
    ],
)
def test_verdicts(measured: dict[str, Any], kind: str, step: int, where: str) -> None:
    verdict = compare(recorded(), measured, "avx2")
    assert (verdict.kind, verdict.step) == (kind, step)
    assert verdict.where.startswith(where)
    assert bool(verdict.where) == bool(where)


def test_without_bits_of_this_processor_equal_numbers_count_as_rounding() -> None:
    assert compare(recorded(), content(), "avx512f").kind == ROUNDING


def test_a_change_of_a_small_tensor_is_not_hidden_by_large_ones() -> None:
    measured = content()
    for step in STEPS:
        measured["moments"][str(step)] = moment(
            {**tensors(), "bias": tensors()["bias"] + 1e-8}, {"loss": 1.0}
        )
    verdict = compare(recorded(), measured, "avx2")
    assert (verdict.kind, verdict.where) == (CHANGED, "bias")
