"""Tests the penalty and the networks of WGAN-GP; tests/benchmarks/test_equal_work.py has its
losses."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import Input, Model, Sequential, layers
from numpy.testing import assert_allclose

from tests.fixtures import parametrize
from trainer.base.settings.model_settings import WGANGPConfig
from trainer.models.gan import build_critic, build_generator
from trainer.models.wgan_gp import gradient_norms

OF_NORM_5 = np.zeros((4, 4, 1), np.float32)
OF_NORM_5[0, 0] = 3.0
OF_NORM_5[3, 3] = 4.0


def linear_critic(weights: Any, dtype: str = "float32") -> Model:
    """Returns a critic with score = <weights, image>, whose gradient at any image is `weights`."""
    critic = Sequential([Input(weights.shape), layers.Flatten(), layers.Dense(1, dtype=dtype)])
    critic.layers[-1].set_weights([weights.reshape(-1, 1), np.zeros(1)])
    return critic


@parametrize("policy", ["float32", "mixed_bfloat16"])
def test_the_gradient_norm_of_a_linear_critic_is_that_of_its_weights(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    norms = gradient_norms(
        linear_critic(OF_NORM_5), tf.random.stateless_normal((6, 4, 4, 1), (1, 2))
    )
    assert_allclose(norms, np.full(6, 5.0), rtol=1e-6)


@parametrize("policy", ["float32", "mixed_bfloat16"])
def test_where_the_gradient_is_zero_the_norms_gradient_is_zero(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    critic = linear_critic(np.zeros((4, 4, 1), np.float32), dtype=policy)
    kernel = critic.layers[-1].kernel.value
    with tf.GradientTape() as tape:
        norms = gradient_norms(critic, tf.ones((6, 4, 4, 1)))
        penalty = tf.reduce_mean(tf.square(norms - 1.0))
    assert norms.numpy().tolist() == [0.0] * 6
    assert float(penalty) == 1.0
    assert np.array_equal(tape.gradient(penalty, kernel), np.zeros((16, 1)))


@parametrize("size", [16, 24, 40, 64, 256])
@parametrize("channels", [1, 3])
def test_networks_fit_every_size(size: int, channels: int) -> None:
    config = WGANGPConfig(image_size=size, channels=channels, width=2, latent_dim=4)
    generator = build_generator(config)
    critic = build_critic(config)
    assert generator.output_shape == critic.input_shape == (None, size, size, channels)
    assert critic.output_shape == (None, 1)
    assert not any(isinstance(layer, layers.BatchNormalization) for layer in critic.layers)
