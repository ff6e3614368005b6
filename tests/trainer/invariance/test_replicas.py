"""Tests fifty steps of a WGAN-GP in other precisions (tests/trainer/models has float64), and
Keras's RematScope."""

from contextlib import nullcontext
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest

from tests.support import classifier_of, largest_difference, run_steps, slow, small, weights
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset

# ten times the default: fifty steps then move the weights well
LEARNING_RATE = "--learning_rate=1e-3"


@cache
def trained(replicas: int, *flags: str) -> tuple[dict[str, Any], Any]:
    model, logs = run_steps(small(f"--replicas={replicas}", *flags), 50)
    return weights(model), logs


@pytest.mark.slow
def test_fifty_steps_move_every_kernel() -> None:
    untrained, _ = run_steps(small("--precision=float64"), 0)
    before = weights(untrained)
    (after, _) = trained(1, "--precision=float64", LEARNING_RATE)
    kernels = [name for name in after if after[name].ndim > 1]
    assert (
        min(
            np.linalg.norm(after[name] - before[name]) / np.linalg.norm(before[name])
            for name in kernels
        )
        > 0.05
    )


@pytest.mark.slow  # loss scaling: test_gradients.py and test_micro_batches.py
@pytest.mark.parametrize(
    ("precision", "tolerance", "replicas"),
    [
        ("mixed_float16", 0.002, 1),
        ("mixed_float16", 0.002, 2),
        ("mixed_bfloat16", 0.02, 1),
        ("mixed_bfloat16", 0.02, 2),
    ],
)
def test_mixed_precision_stays_near_float32(
    precision: str, tolerance: float, replicas: int
) -> None:
    """Checks that the losses of fifty steps are within `tolerance` of float32's, relative to the
    largest loss."""
    (_, single) = trained(1)
    (_, mixed) = trained(replicas, f"--precision={precision}")
    assert np.isfinite(mixed.values).all()
    assert single.names == mixed.names
    assert np.abs(single.values - mixed.values).max() < tolerance * np.abs(single.values).max()


def recomputing(config: TrainConfig, dataset: Dataset, *, mode: str = "") -> keras.Model:
    with keras.RematScope(mode=mode) if mode else nullcontext():
        layers = [keras.layers.Conv2D(8, 3, padding="same", activation="gelu") for _ in range(2)]
    return classifier_of(dataset.image_shape, *layers, keras.layers.GlobalAveragePooling2D())


@pytest.mark.parametrize("mode", ["full", slow("activations")])
def test_layers_that_keras_recomputes_train_to_the_same_numbers_on_any_number_of_replicas(
    mode: str,
) -> None:
    """With RematScope, which takes only layers whose call has no `training` in its mode "full"."""
    flags = (f"--model={__name__}:recomputing", "--precision=float64", "--jit_compile=false")
    plain, one, two = (
        weights(run_steps(small(*flags, *own), 3)[0])
        for own in ((), (f"--mode={mode}",), (f"--mode={mode}", "--replicas=2"))
    )
    assert largest_difference(plain, one) < 1e-12
    assert largest_difference(one, two) < 1e-12
