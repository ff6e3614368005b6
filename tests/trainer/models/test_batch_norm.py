"""Tests that our batch norm equals Keras's, up to rounding, in outputs, gradients and moving statistics."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.models.layers import FusedBatchNormalization

RANDOM = np.random.default_rng(0)
TOLERANCE = {"float32": 3e-5, "float64": 1e-12, "mixed_bfloat16": 0.02}


def computed(layer: keras.layers.Layer, inputs: tf.Tensor) -> list[np.ndarray]:
    """Returns outputs, gradients by inputs and weights, the new moving statistics, and the outputs at inference."""
    weights = [weight.value for weight in layer.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = layer(inputs, training=True)
        loss = tf.reduce_sum(tf.sin(3.0 * outputs))
    found = [outputs, *tape.gradient(loss, [inputs, *weights]), *layer.non_trainable_variables, layer(inputs)]
    return [np.asarray(tf.cast(value, tf.float64)) for value in found]


@pytest.mark.parametrize(("precision", "tolerance"), TOLERANCE.items())
@pytest.mark.parametrize("shape", [(8, 6, 6, 5), (1, 1, 2, 3)])
def test_as_keras_does(precision: str, tolerance: float, shape: tuple[int, ...]) -> None:
    ours = FusedBatchNormalization(momentum=0.9, dtype=precision)
    plain = ours.plain()
    assert type(plain) is keras.layers.BatchNormalization
    values = [RANDOM.uniform(0.5, 1.5, shape[-1]) for _ in range(4)]
    for layer in (ours, plain):
        layer.build((None, *shape[1:]))
        layer.set_weights(values)
    inputs = tf.cast(RANDOM.normal(2.0, 3.0, shape), ours.compute_dtype)
    for one, other in zip(computed(ours, inputs), computed(plain, inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * np.abs(other).max())


def test_frozen_batch_norm_keeps_its_statistics_in_training() -> None:
    layer = FusedBatchNormalization(trainable=False)
    inputs = tf.constant(RANDOM.normal(2.0, 3.0, (8, 6, 6, 5)), tf.float32)
    np.testing.assert_array_equal(layer(inputs, training=True), layer(inputs))
    np.testing.assert_array_equal(layer.moving_mean, np.zeros(5))
