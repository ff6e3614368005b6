"""Tests a WGAN-GP of fifty steps in other precisions; tests/trainer/models has its replicas in float64."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support import run_steps, small, weights

LEARNING_RATE = "--learning_rate=1e-3"  # ten times the default: fifty steps then move the weights well


@cache
def trained(replicas: int, *flags: str) -> tuple[dict[str, Any], Any]:
    model, logs = run_steps(small(f"--replicas={replicas}", *flags), 50)
    return weights(model), logs


@pytest.mark.slow
def test_fifty_steps_move_every_kernel() -> None:
    untrained, _ = run_steps(small("--precision=float64"), 0)
    before, (after, _) = weights(untrained), trained(1, "--precision=float64", LEARNING_RATE)
    kernels = [name for name in after if after[name].ndim > 1]
    assert min(np.linalg.norm(after[name] - before[name]) / np.linalg.norm(before[name]) for name in kernels) > 0.05


@pytest.mark.slow  # loss scaling: test_gradients.py and test_micro_batches.py
@pytest.mark.parametrize(("precision", "tolerance", "replicas"), [
    ("mixed_float16", 0.002, 1), ("mixed_float16", 0.002, 2), ("mixed_bfloat16", 0.02, 1), ("mixed_bfloat16", 0.02, 2),
])  # fmt: skip
def test_mixed_precision_stays_near_float32(precision: str, tolerance: float, replicas: int) -> None:
    """Checks that the losses of fifty steps are within `tolerance` of float32's, relative to the largest loss."""
    (_, single), (_, mixed) = trained(1), trained(replicas, f"--precision={precision}")
    assert np.isfinite(mixed.values).all()
    assert single.names == mixed.names
    assert np.abs(single.values - mixed.values).max() < tolerance * np.abs(single.values).max()
