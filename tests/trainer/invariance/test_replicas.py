"""Tests that the number of replicas does not change the result, over 50 steps on 1, 2 and 4 of them."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures import Capture, Patch
from tests.support import largest_difference, permute_rows, run_steps, small, weights

LEARNING_RATE = "--learning_rate=1e-3"  # ten times the default: fifty steps then move the weights well


@cache
def trained(replicas: int, *flags: str) -> tuple[dict[str, Any], Any]:
    model, logs = run_steps(small(f"--replicas={replicas}", *flags), 50)
    return weights(model), logs


def loss_difference(one: Any, other: Any) -> float:
    assert one.names == other.names
    return float(np.max(np.abs(one.values - other.values)))


@pytest.mark.parametrize("replicas", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_in_float64_replicas_agree_to_1e_10(replicas: int) -> None:
    flags = ("--precision=float64", LEARNING_RATE)
    (alone, alone_logs), (together, logs) = trained(1, *flags), trained(replicas, *flags)
    assert largest_difference(alone, together) < 1e-10
    assert loss_difference(alone_logs, logs) < 1e-10


def test_fifty_steps_move_every_kernel() -> None:
    untrained, _ = run_steps(small("--precision=float64"), 0)
    before, (after, _) = weights(untrained), trained(1, "--precision=float64", LEARNING_RATE)
    kernels = [name for name in after if after[name].ndim > 1]
    assert min(np.linalg.norm(after[name] - before[name]) / np.linalg.norm(before[name]) for name in kernels) > 0.05


@pytest.mark.slow  # of a classifier: tests/trainer/models/test_models.py
def test_in_float32_replicas_differ_by_rounding_alone(monkeypatch: Patch, capsys: Capture) -> None:
    """Compares with a control that differs only by rounding: one replica with the rows of each batch reordered."""
    (alone, alone_logs), (found, found_logs) = trained(1, LEARNING_RATE), trained(2, LEARNING_RATE)
    controls = []
    for seed in (7, 8):
        with monkeypatch.context() as patch:
            permute_rows(patch, 16, seed)
            controls.append(run_steps(small(LEARNING_RATE), 50))
    allowed = max(largest_difference(alone, weights(control)) for control, _ in controls)
    difference = largest_difference(alone, found)
    with capsys.disabled():
        print(f"\nfloat32, 2 replicas: weights differ by {difference:.1e}, the control by {allowed:.1e}")
    assert difference <= 3 * allowed
    assert loss_difference(alone_logs, found_logs) <= 3 * max(loss_difference(alone_logs, logs) for _, logs in controls)


@pytest.mark.slow  # loss scaling: test_gradients.py and test_micro_batches.py
@pytest.mark.parametrize(("precision", "tolerance", "replicas"), [
    ("mixed_float16", 0.002, 1), ("mixed_float16", 0.002, 2), ("mixed_bfloat16", 0.02, 1), ("mixed_bfloat16", 0.02, 2),
])  # fmt: skip
def test_mixed_precision_stays_near_float32(precision: str, tolerance: float, replicas: int) -> None:
    """Checks that the losses of fifty steps are within `tolerance` of float32's, relative to the largest loss."""
    (_, single), (_, mixed) = trained(1), trained(replicas, f"--precision={precision}")
    assert np.isfinite(mixed.values).all()
    assert loss_difference(single, mixed) < tolerance * np.abs(single.values).max()


@pytest.mark.slow  # whole steps in float64: tests/trainer/training/test_xla_choice.py
@pytest.mark.parametrize(("replicas", "precision"), [(1, "mixed_bfloat16"), (2, "float32")])
def test_compiled_gradients_are_the_same_gradients(replicas: int, precision: str) -> None:
    """The whole step on one device; on two, which XLA cannot sum over, the gradients of the critic."""
    (_, plain), (_, compiled) = trained(1), trained(replicas, "--jit_compile", f"--precision={precision}")
    assert loss_difference(plain, compiled) < 0.02 * np.abs(plain.values).max()


def test_jit_compile_compiles() -> None:
    model, _ = run_steps(small("--jit_compile"), 0)
    images, factors = tf.zeros((16, 16, 16, 1)), tf.zeros((16, 1, 1, 1))
    compiled = model._traced_gradients.experimental_get_compiler_ir(images, images, factors, 16, None)
    assert "HloModule" in compiled(stage="hlo")
    plain, _ = run_steps(small(), 0)
    with pytest.raises(ValueError, match="jit_compile"):
        plain._traced_gradients.experimental_get_compiler_ir(images, images, factors, 16, None)
