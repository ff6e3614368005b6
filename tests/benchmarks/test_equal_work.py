"""Tests the losses and gradients of our GANs against those of the tutorials; test_as_fit.py has
classifiers."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.tutorial import GAN
from tests.support import small
from trainer.cluster.strategy import make_replicas
from trainer.models.gan import Generated
from trainer.run.training_setup import build_setup


def loss_and_gradients(loss: Any, network: keras.Model) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        value = loss()
    return value, tape.gradient(value, network.trainable_variables)


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Asserts that loss and gradients agree up to the rounding of float32."""
    assert float(one[0]) == pytest.approx(float(other[0]), rel=1e-4)
    for mine, theirs in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4 * float(np.abs(mine).max()) + 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wgan_gp", "dcgan"])
def test_the_tutorials_gan_has_our_losses_and_gradients(name: str) -> None:
    config = small(f"--model={name}")
    setup = build_setup(config, make_replicas(config))
    model = setup.model
    peer = GAN(setup)
    rows = config.global_batch_size
    images, *_ = setup.dataset.train.gather(tf.range(rows))
    reals = tf.cast(images, tf.float32) / 127.5 - 1.0
    noise = tf.random.stateless_normal((rows, model.latent_dim), (1, 2))
    mix = tf.random.stateless_uniform((rows, 1, 1, 1), (3, 4))
    drawn = Generated(noise=noise)
    (fakes,) = model.fakes(drawn)
    others = () if name == "dcgan" else (mix,)
    losses, gradients = model.critic_gradients(reals, fakes, *others, rows)
    critic = loss_and_gradients(lambda: peer.critic_loss(reals, noise, mix), peer.critic)
    same((next(iter(losses.values())), gradients), critic)
    generator = loss_and_gradients(lambda: peer.generator_loss(noise), peer.generator)
    same(model.generator_gradients(drawn, rows), generator)
