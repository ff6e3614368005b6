"""Tests fifty steps of a WGAN-GP in other precisions (tests/trainer/models has float64), and
Keras's RematScope."""

from contextlib import nullcontext

import keras
import numpy as np
from keras import Model, layers

from tests.fixtures import SLOW, parametrize
from tests.support import classifier_of, largest_difference, run_steps, slow, small, weights
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset


@SLOW  # loss scaling: test_internals.py and tests/trainer/models/test_as_fit.py
@parametrize("precision, tolerance", [("mixed_float16", 0.002), ("mixed_bfloat16", 0.02)])
def test_mixed_precision_on_two_replicas_stays_near_float32_on_one(
    precision: str, tolerance: float
) -> None:
    """Checks that the losses of fifty steps are within `tolerance` of float32's, relative to the
    largest loss."""
    _, single = run_steps(small(), 50)
    _, mixed = run_steps(small("--replicas=2", f"--precision={precision}"), 50)
    assert np.isfinite(mixed.values).all()
    assert single.names == mixed.names
    assert np.abs(single.values - mixed.values).max() < tolerance * np.abs(single.values).max()


def recomputing(config: TrainConfig, dataset: Dataset, *, mode: str = "") -> Model:
    with keras.RematScope(mode=mode) if mode else nullcontext():
        parts = [layers.Conv2D(8, 3, padding="same", activation="gelu") for _ in range(2)]
    return classifier_of(dataset.image_shape, *parts, layers.GlobalAveragePooling2D())


@parametrize("mode", ["full", slow("activations")])
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
