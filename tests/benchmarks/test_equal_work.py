"""Tests that all candidates do the same work: same weights and rows in, same losses and updates
out."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.keras_fit import batches_for, model_for
from benchmarks.processes import write_digits
from benchmarks.tutorial import GAN, classifier_loop
from tests.support import of_model
from trainer.base.settings.request import resolve
from trainer.cluster.strategy import make_replicas
from trainer.models.gan import Generated
from trainer.run.export import plain_copy
from trainer.run.training_setup import TrainingSetup, build_setup

GANS = ("wgan_gp", "dcgan")
ROWS = 8
ROOT = Path(__file__).parents[2]


@pytest.fixture
def build(tmp_path: Path) -> Any:
    """Returns `build(model)`: it builds a small model on digits that every framework reads from one
    file."""

    def make(model: str) -> TrainingSetup:
        size = {"cnn": 24, "mlp": 8}.get(model, 16)
        flags = [
            "--width=4",
            "--latent_dim=8",
            "--critic_steps=2",
            f"--image_size={size}",
            f"--data={tmp_path}/d.npz",
        ]
        flags = [f"--model={model}", *of_model(flags, [f"--model={model}"])]
        config = resolve([*flags, f"--global_batch_size={ROWS}", "--learning_rate=1e-3"]).config
        write_digits(config)
        return build_setup(config, make_replicas(config))

    return make


def draws(setup: TrainingSetup) -> tuple[Any, Any, Any]:
    """Returns real images in [-1, 1], noise and interpolation factors."""
    reals = setup.dataset.train.gather(tf.range(ROWS))[0]
    noise = tf.random.stateless_normal((ROWS, setup.model.latent_dim), (1, 2))
    return (
        tf.cast(reals, tf.float32) / 127.5 - 1.0,
        noise,
        tf.random.stateless_uniform((ROWS, 1, 1, 1), (3, 4)),
    )


def loss_and_gradients(loss: Any, network: keras.Model) -> tuple[float, list[Any]]:
    """Returns the value of `loss()` and its gradients by the weights of `network`."""
    with tf.GradientTape() as tape:
        value = loss()
    return float(value), tape.gradient(value, network.trainable_variables)


def ours(setup: TrainingSetup) -> tuple[Any, Any]:
    """Returns (loss, gradients) of the critic and of the generator by the model of this project."""
    model = setup.model
    (reals, noise, mix) = draws(setup)
    (fakes,) = model.fakes(Generated(noise=noise))
    others = () if setup.config.model == "dcgan" else (mix,)
    losses, gradients = model.critic_gradients(reals, fakes, *others, ROWS)
    return (next(iter(losses.values())), gradients), model.generator_gradients(
        Generated(noise=noise), ROWS
    )


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Asserts that loss and gradients agree up to the rounding of float32."""
    assert float(one[0]) == pytest.approx(float(other[0]), rel=1e-4)
    for mine, theirs in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4 * float(np.abs(mine).max()) + 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("model", GANS)
def test_the_tutorials_gan_has_our_losses_and_gradients(model: str, build: Any) -> None:
    setup = build(model)
    peer = GAN(setup)
    (reals, noise, mix) = draws(setup)
    critic, generator = ours(setup)
    same(critic, loss_and_gradients(lambda: peer.critic_loss(reals, noise, mix), peer.critic))
    same(generator, loss_and_gradients(lambda: peer.generator_loss(noise), peer.generator))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_after_some_steps_a_classifier_has_our_weights(model: str, build: Any) -> None:
    setup = build(model)
    steps = 6
    fitted = model_for(setup, 2, jit_compile=False)
    network = plain_copy(setup.model)
    fitted.fit(batches_for(setup), steps_per_epoch=steps, shuffle=False, verbose=0)
    classifier_loop(setup, network)(steps)
    setup.step_runner()(setup.rows_from(0), 0, steps)
    for peer in (fitted, network):
        for mine, theirs in zip(setup.model.get_weights(), peer.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)
