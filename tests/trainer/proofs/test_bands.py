"""Tests what counts as agreement: float32 against the control, shorter factors within their bands."""

import math

import numpy as np
import pytest

from trainer.proofs.on_gpus import (
    BANDS,
    Difference,
    Trained,
    banded_difference,
    difference,
    float32_difference,
    largest,
)


def trained(after: float = 1.0, loss: float = -4.0, norm: float = 10.0) -> Trained:
    return Trained(
        {"trained": [np.zeros(4)]}, {"trained": [np.full(4, after)]}, {"loss": loss, "small_loss": 0.001}, norm
    )


def test_weights_are_compared_with_how_far_they_moved() -> None:
    """Moving statistics that change by more do not hide it, and frozen weights have to be equal."""
    start = {"trained": [np.full(4, 99.0)], "others": [np.zeros(4)], "frozen": [np.ones(4)]}
    moved = Trained(start, {**start, "trained": [np.full(4, 100.0)], "others": [np.full(4, 1e9)]}, {}, 1.0)
    other = Trained(start, {**moved.after, "trained": [np.full(4, 100.5)]}, {}, 1.0)
    assert difference(other, moved).weights == pytest.approx(0.5)
    assert difference(moved, moved).weights == 0.0
    assert difference(Trained(start, {**moved.after, "frozen": [np.zeros(4)]}, {}, 1.0), moved).weights > 1e9


def test_losses_are_compared_with_the_largest() -> None:
    """A loss near 0 differs by all of itself from rounding alone."""
    assert difference(trained(loss=-4.4), trained()).loss == pytest.approx(0.1)


@pytest.mark.parametrize(("after", "control", "agrees"), [
    (1.0 + 2.9e-4, 1e-4, True), (1.0 + 3.1e-4, 1e-4, False), (1.0 + 2e-7, 0.0, True), (math.nan, 1e-4, False),
])  # fmt: skip
def test_float32_may_differ_by_three_times_the_control(after: float, control: float, agrees: bool) -> None:
    found = float32_difference(trained(after), trained(), Difference(control, 0.0, 0.0))
    assert (found.problem == "") is agrees
    assert agrees or found.problem.startswith("weights differ by ")


def test_a_loss_that_is_doubled_does_not_agree_in_float32() -> None:
    """Adam makes the same steps of doubled gradients: the weights alone would not show it."""
    rounding = largest([difference(one, trained()) for one in (trained(1.001, norm=10.001), trained(1.002))])
    assert (rounding.weights, rounding.gradient) == (pytest.approx(2e-3), pytest.approx(1e-4))
    assert "losses differ" in float32_difference(trained(loss=-8.0), trained(), rounding).problem
    assert "gradients differ" in float32_difference(trained(norm=20.0), trained(), rounding).problem


@pytest.mark.parametrize("precision", BANDS)
def test_shorter_factors_have_a_band_of_losses_and_gradients(precision: str) -> None:
    band = BANDS[precision]
    for share, agrees in ((0.9, True), (1.1, False)):
        loss = banded_difference(trained(loss=-4.0 * (1 + share * band)), trained(), band)
        gradient = banded_difference(trained(norm=10.0 * (1 - share * band)), trained(), band)
        assert [bool(loss.problem), bool(gradient.problem)] == [not agrees] * 2
    assert banded_difference(trained(loss=math.nan), trained(), band).problem.startswith("losses differ by nan")
    assert not banded_difference(trained(after=7.0), trained(), band).problem  # Adam turns rounding into whole steps
