"""Tests WGAN-GP against the paper: https://arxiv.org/abs/1704.00028, Algorithm 1."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import run_steps, small
from trainer.base.settings.train_config import TrainConfig
from trainer.data.batches import Schedule, row_order
from trainer.data.image_arrays import load_digits
from trainer.invariance.step import StepContext
from trainer.models.gan import OfGAN, build_critic, build_generator, filters
from trainer.models.wgan_gp import gradient_norms

OF_NORM_5 = np.zeros((4, 4, 1), np.float32)
OF_NORM_5[0, 0], OF_NORM_5[3, 3] = 3.0, 4.0


def linear_critic(weights: Any, dtype: str = "float32") -> keras.Model:
    """Returns a critic with score = <weights, image>, whose gradient at any image is `weights`."""
    critic = keras.Sequential([keras.Input(weights.shape), keras.layers.Flatten(), keras.layers.Dense(1, dtype=dtype)])
    critic.layers[-1].set_weights([weights.reshape(-1, 1), np.zeros(1)])
    return critic


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_the_gradient_norm_of_a_linear_critic_is_that_of_its_weights(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    norms = gradient_norms(linear_critic(OF_NORM_5), tf.random.stateless_normal((6, 4, 4, 1), (1, 2)))
    np.testing.assert_allclose(norms, np.full(6, 5.0), rtol=1e-6)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
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


@pytest.mark.parametrize("size", [16, 24, 40, 64, 256])
@pytest.mark.parametrize("channels", [1, 3])
def test_networks_fit_every_size(size: int, channels: int) -> None:
    config, shared = TrainConfig(image_size=size, channels=channels), OfGAN(width=2, latent_dim=4)
    generator, critic = build_generator(config, shared), build_critic(config, shared)
    assert generator.output_shape == critic.input_shape == (None, size, size, channels)
    assert critic.output_shape == (None, 1)
    assert not any(isinstance(layer, keras.layers.BatchNormalization) for layer in critic.layers)


def test_filters_double_up_to_eight_times_the_width() -> None:
    assert filters(256, width=10) == [10, 20, 40, 80, 80, 80]
    assert filters(32, width=32) == [32, 64, 128]


class Paper:
    """Runs one critic and one generator step in plain TensorFlow, for 16 pixels: two convolutions each."""

    def __init__(self, model: keras.Model):
        self.theta = [tf.Variable(v) for v in model.generator.trainable_variables]
        self.w = [tf.Variable(v) for v in model.critic.trainable_variables]

    def generator(self, z: Any) -> Any:
        dense, gamma0, beta0, up1, gamma1, beta1, up2, bias = self.theta
        x = self.batch_norm_relu(tf.reshape(z @ dense, (-1, 4, 4, dense.shape[1] // 16)), gamma0, beta0)
        x = tf.nn.conv2d_transpose(x, up1, (len(z), 8, 8, up1.shape[2]), 2)
        x = self.batch_norm_relu(x, gamma1, beta1)
        return tf.tanh(tf.nn.conv2d_transpose(x, up2, (len(z), 16, 16, up2.shape[2]), 2) + bias)

    @staticmethod
    def batch_norm_relu(x: Any, gamma: Any, beta: Any) -> Any:
        mean, variance = tf.nn.moments(x, (0, 1, 2))
        return tf.nn.relu(gamma * (x - mean) / tf.sqrt(variance + 1e-3) + beta)

    def critic(self, x: Any) -> Any:
        kernel0, bias0, kernel1, bias1, dense, bias = self.w
        for kernel, add in ((kernel0, bias0), (kernel1, bias1)):
            x = tf.nn.leaky_relu(tf.nn.conv2d(x, kernel, 2, "SAME") + add, 0.2)
        return tf.reshape(x, (len(x), -1)) @ dense + bias

    def critic_step(self, x: Any, z: Any, epsilon: Any) -> Any:
        fake = self.generator(z)
        mixed = epsilon * x + (1 - epsilon) * fake
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                score = self.critic(mixed)
            slope = tf.sqrt(tf.reduce_sum(inner.gradient(score, mixed) ** 2, (1, 2, 3)))
            loss = tf.reduce_mean(self.critic(fake) - self.critic(x) + 10 * ((slope - 1) ** 2)[:, None])
        self.adam(self.w, outer.gradient(loss, self.w))
        return loss

    def generator_step(self, z: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(-self.critic(self.generator(z)))
        self.adam(self.theta, tape.gradient(loss, self.theta))
        return loss

    @staticmethod
    def adam(variables: Any, gradients: Any, alpha: float = 1e-4, beta2: float = 0.9) -> None:
        """Makes the first step of Adam with beta_1 = 0: m = g, v = (1 - beta2) g^2, both with their bias corrected."""
        for variable, g in zip(variables, gradients, strict=True):
            v = (1 - beta2) * g**2
            variable.assign_sub(alpha * np.sqrt(1 - beta2) * g / (tf.sqrt(v) + 1e-7))


def test_the_first_step_is_that_of_the_paper() -> None:
    config = small("--precision=float64", "--critic_steps=1", "--seed=4")
    untrained, _ = run_steps(config, 0)
    model, logs = run_steps(config, 1)
    paper = Paper(untrained)

    step = StepContext(config.seed, tf.constant(0, tf.int64), 0, 16, 16)
    noise = step.normal((2, model.latent_dim), stream="noise")
    epsilon = step.uniform((1, 1, 1, 1), stream="interpolation")[:, 0]
    digits: Any = load_digits(config).train
    (rows,) = next(iter(row_order(digits, Schedule(1797, 16, 1, config.seed), 0, 1))).numpy()
    reals = tf.constant(digits.images[rows] / 127.5 - 1)

    losses = [float(paper.critic_step(reals, noise[:, 0], epsilon)), float(paper.generator_step(noise[:, 1]))]
    assert [logs.means()[name] for name in ("critic_loss", "generator_loss")] == pytest.approx(losses, rel=1e-6)
    for variables, network in ((paper.w, model.critic), (paper.theta, model.generator)):
        for expected, variable in zip(variables, network.trainable_variables, strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_the_average_follows_the_generator() -> None:
    """Checks that after one step, with decay min(0.999, 1/10), the average is 1/10 old and 9/10 new."""
    config = small("--precision=float64")
    before, _ = run_steps(config, 0)
    after, _ = run_steps(config, 1)
    networks = (before.generator, after.generator, after.generator_average)
    for old, new, average in zip(*(network.trainable_variables for network in networks), strict=True):
        np.testing.assert_allclose(average.numpy(), 0.1 * old.numpy() + 0.9 * new.numpy(), rtol=1e-7, atol=1e-12)


def test_without_decay_the_average_is_the_generator() -> None:
    model, _ = run_steps(small("--ema_decay=0"), 3)
    networks = (model.averaged_generator(), model.generator)
    for averaged, trained in zip(*(network.get_weights() for network in networks), strict=True):
        np.testing.assert_allclose(averaged, trained, rtol=1e-6, atol=1e-7)
