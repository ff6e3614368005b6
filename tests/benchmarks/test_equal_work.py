"""Tests that all candidates do the same work: same weights and rows in, same losses and updates out."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.keras_fit import batches_for, model_for
from benchmarks.processes import write_digits
from benchmarks.trainer_loop import networks, optimizers, work_of
from benchmarks.tutorial import GAN, classifier_loop
from tests.support import of_model
from trainer.base.settings.resolution import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.models.gan import Generated
from trainer.run.export import plain_copy
from trainer.run.training_setup import TrainingSetup, build_setup

GANS = ("wgan_gp", "dcgan")
ROWS = 8
ROOT = Path(__file__).parents[2]


@pytest.fixture
def build(tmp_path: Path) -> Any:
    """Returns `build(model)`: it builds a small model on digits that every framework reads from one file."""

    def make(model: str) -> TrainingSetup:
        size = {"cnn": 24, "mlp": 8}.get(model, 16)
        flags = ["--width=4", "--latent_dim=8", "--critic_steps=2", f"--image_size={size}", f"--data={tmp_path}/d.npz"]
        flags = [f"--model={model}", *of_model(flags, [f"--model={model}"])]
        config = resolve([*flags, f"--global_batch_size={ROWS}", "--learning_rate=1e-3"]).config
        write_digits(config)
        return build_setup(config, make_replicas(config))

    return make


def draws(setup: TrainingSetup) -> tuple[Any, Any, Any]:
    """Returns real images in [-1, 1], noise and interpolation factors."""
    reals = setup.dataset.train.gather(tf.range(ROWS))[0]
    noise = tf.random.stateless_normal((ROWS, setup.model.latent_dim), (1, 2))
    return tf.cast(reals, tf.float32) / 127.5 - 1.0, noise, tf.random.stateless_uniform((ROWS, 1, 1, 1), (3, 4))


def loss_and_gradients(loss: Any, network: keras.Model) -> tuple[float, list[Any]]:
    """Returns the value of `loss()` and its gradients by the weights of `network`."""
    with tf.GradientTape() as tape:
        value = loss()
    return float(value), tape.gradient(value, network.trainable_variables)


def ours(setup: TrainingSetup) -> tuple[Any, Any]:
    """Returns (loss, gradients) of the critic and of the generator by the model of this project."""
    model, (reals, noise, mix) = setup.model, draws(setup)
    (fakes,) = model.fakes(noise)
    if setup.config.model == "dcgan":
        critic = model.critic_gradients(reals, fakes, ROWS)
    else:
        losses, gradients = model.critic_gradients(reals, fakes, mix, ROWS)
        critic = losses["critic_loss"], gradients
    return critic, model.generator_gradients(Generated(noise=noise), ROWS)


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Asserts that loss and gradients agree up to the rounding of float32."""
    assert float(one[0]) == pytest.approx(float(other[0]), rel=1e-4)
    for mine, theirs in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4 * float(np.abs(mine).max()) + 1e-7)


@pytest.mark.parametrize("model", GANS)
def test_the_tutorials_gan_has_our_losses_and_gradients(model: str, build: Any) -> None:
    setup = build(model)
    peer, (reals, noise, mix) = GAN(setup), draws(setup)
    critic, generator = ours(setup)
    same(critic, loss_and_gradients(lambda: peer.critic_loss(reals, noise, mix), peer.critic))
    same(generator, loss_and_gradients(lambda: peer.generator_loss(noise), peer.generator))


@pytest.mark.parametrize("model", ["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_after_some_steps_a_classifier_has_our_weights(model: str, build: Any) -> None:
    setup, steps = build(model), 6
    fitted = model_for(setup, 2, jit_compile=False)
    network = plain_copy(setup.model)
    fitted.fit(batches_for(setup), steps_per_epoch=steps, shuffle=False, verbose=0)
    classifier_loop(setup, network)(steps)
    setup.step_runner()(setup.rows_from(0), 0, steps)
    for peer in (fitted, network):
        for mine, theirs in zip(setup.model.get_weights(), peer.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)


@pytest.mark.slow
def test_fit_makes_as_many_updates_of_a_gan(build: Any) -> None:
    setup = build("wgan_gp")
    fitted = model_for(setup, 2, jit_compile=False)
    fitted.fit(batches_for(setup), steps_per_epoch=4, shuffle=False, verbose=0)
    setup.step_runner()(setup.rows_from(0), 0, 4)
    theirs = (fitted.gan.generator_optimizer, fitted.gan.critic_optimizer)
    assert [int(each.iterations) for each in theirs] == [int(each.iterations) for each in optimizers(setup.model)]


@pytest.mark.slow
@pytest.mark.parametrize("model", [*GANS, "cnn", "mlp"])
def test_pytorch_has_our_losses_and_gradients(model: str, build: Any, tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    setup, found = build(model), list[Any]()
    if model in GANS:
        found, inputs = [*ours(setup)[::-1]], draws(setup)
    else:
        inputs = setup.dataset.train.gather(tf.range(ROWS))
        network = setup.model
        found = [loss_and_gradients(lambda: cross_entropy(network, *inputs), network)]
    names: Any = {f"input {place}": np.asarray(value) for place, value in enumerate(inputs)}
    for which, network in enumerate(networks(setup.model)):
        names |= {f"{which} {place:02}": value for place, value in enumerate(pytorch_weights(network))}
    np.savez(tmp_path / "given.npz", **names)
    theirs = run_pytorch(setup.config, tmp_path / "given.npz")
    assert theirs["work"] == work_of(networks(setup.model), optimizers(setup.model))
    for (loss, gradients), (their_loss, their_norms) in zip(found, theirs["losses and norms"], strict=True):
        assert float(loss) == pytest.approx(their_loss, rel=1e-4)
        assert sorted(float(tf.norm(each)) for each in gradients) == pytest.approx(their_norms, rel=1e-3, abs=1e-6)


def cross_entropy(network: keras.Model, images: Any, labels: Any) -> Any:
    """Returns the loss of our compiled classifier."""
    return network.compute_loss(y=labels, y_pred=network(tf.cast(images, tf.float32), training=True))


def run_pytorch(config: TrainConfig, given: Path) -> dict[str, Any]:
    """Runs PyTorch in another process: it does not always work beside TensorFlow in one."""
    names = ("model", "image_size", "width", "latent_dim", "data", "global_batch_size", "critic_steps", "learning_rate")
    flags = [f"--{name}={getattr(config, name)}" for name in names if hasattr(config, name)]
    command = [sys.executable, "-m", "tests.benchmarks.pytorch_losses", str(given), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def pytorch_weights(network: keras.Model) -> Iterator[Any]:
    """Yields Keras's weights with PyTorch's order of axes, without moving averages."""
    for layer in network.layers:
        for place, weight in enumerate(np.asarray(weight) for weight in layer.trainable_weights):
            if weight.ndim == 4:
                yield weight.transpose(3, 2, 0, 1)
            else:
                yield _dense(weight, network, layer).T if weight.ndim == 2 and place == 0 else weight


def _dense(kernel: Any, network: keras.Model, layer: keras.layers.Layer) -> Any:
    """Returns a dense kernel (in, out) with the side next to an image reordered from (height, width, channels)."""
    place = network.layers.index(layer)
    before, after = network.layers[place - 1], network.layers[(place + 1) % len(network.layers)]
    if isinstance(before, keras.layers.Flatten):
        shape = before.input.shape[1:]
        return kernel.reshape(*shape, -1).transpose(2, 0, 1, 3).reshape(kernel.shape)
    if isinstance(after, keras.layers.Reshape):
        return kernel.reshape(-1, *after.target_shape).transpose(0, 3, 1, 2).reshape(kernel.shape)
    return kernel
