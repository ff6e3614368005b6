"""Tests that layers between images and features equal Keras's, with their first and second
gradients."""

import pytest
import tensorflow as tf
from keras import Input, Model, layers
from numpy.random import default_rng
from numpy.testing import assert_allclose

from tests.fixtures import parametrize
from tests.support import in_float64
from trainer.models.image_layers import CONVOLUTION, ImageConv2D, ImageConv2DTranspose
from trainer.run.export import plain_copy

RANDOM = default_rng(0)


@pytest.fixture(autouse=True)
def _float64() -> None:
    in_float64()


def networks(channels: int, size: int) -> list[tuple[Model, Model]]:
    """Returns networks with our layers, each with its template of Keras's layers and the same
    weights."""
    images = Input((size, size, channels))
    features = Input((size // 2, size // 2, 8))
    ours = [
        Model(images, layers.LeakyReLU()(ImageConv2D(8, **CONVOLUTION)(images))),
        Model(features, ImageConv2DTranspose(channels, **CONVOLUTION, activation="tanh")(features)),
    ]
    for network in ours:
        network.set_weights([RANDOM.normal(size=weight.shape) for weight in network.get_weights()])
    return [(network, plain_copy(network)) for network in ours]


def computed(network: Model, inputs: tf.Tensor) -> list[tf.Tensor]:
    """Returns outputs, gradients by inputs and weights, and the weights' gradients of a gradient
    penalty."""
    weights = [weight.value for weight in network.trainable_variables]
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = network(inputs)
            loss = tf.reduce_sum(tf.sin(outputs))
        by_inputs = tape.gradient(loss, inputs)
        penalty = tf.reduce_sum(tf.square(by_inputs))
    zero = tf.UnconnectedGradients.ZERO
    firsts = outer.gradient(loss, weights, unconnected_gradients=zero)
    return [
        outputs,
        by_inputs,
        *firsts,
        *outer.gradient(penalty, weights, unconnected_gradients=zero),
    ]


@parametrize("channels, size", [(1, 8), (3, 6)])
def test_as_keras_does(channels: int, size: int) -> None:
    for ours, plain in networks(channels, size):
        assert {type(layer) for layer in plain.layers}.isdisjoint(
            {ImageConv2D, ImageConv2DTranspose}
        )
        inputs = tf.constant(RANDOM.normal(size=(3, *ours.input_shape[1:])))
        for graph in (False, True):
            function = tf.function(computed) if graph else computed
            for one, other in zip(function(ours, inputs), function(plain, inputs), strict=True):
                assert_allclose(one, other, rtol=1e-10, atol=1e-10)
