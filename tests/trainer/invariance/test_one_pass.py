"""Tests that GANs whose passes are joined have the numbers of plain steps, with a pass of each
network for each update.

The plain steps below are those that this package had; they follow the papers line by line.
"""

from typing import Any

import pytest
import tensorflow as tf

from tests.fixtures import SLOW, Patch, parametrize
from tests.step_memory import counted
from tests.support import largest_difference, run_steps, slow, small
from trainer.data.image_arrays import from_uint8
from trainer.invariance.step import current_step
from trainer.models.dcgan import DCGAN, _cross_entropy
from trainer.models.gan import GAN, Generated, images_of
from trainer.models.r3gan import R3GAN
from trainer.models.wgan_gp import WGANGP


def of_class(given: Any, labels: Any) -> Any:
    """Returns what a network takes: with labels, if the GAN is conditional."""
    return given if labels is None else [given, labels]


def plain_generator_update(model: GAN, noise: Any, labels: Any) -> Any:
    """Updates the generator by one tape through both networks."""
    step = current_step()
    with tf.GradientTape() as tape:
        (fakes,) = model.augmented(model.generator(of_class(noise, labels), training=True))
        scores = model.critic(of_class(fakes, labels), training=True)
        loss = model.generator_loss(scores, None) / step.global_batch_size
    variables = model.generator.trainable_variables
    model.generator_optimizer.apply(tape.gradient(loss, variables), variables)
    model.average_generator(step)
    return loss


def plain_wgan_gp_step(self: WGANGP, data: Any) -> dict[str, Any]:
    """Makes new images, and so new batch statistics, right before each update."""
    step = current_step()
    reals = images_of(data)
    noise = step.normal((self.batches_per_step + 1, self.latent_dim), stream="noise")
    mix = step.uniform((self.batches_per_step, 1, 1, 1), stream="interpolation")
    labels = [None, None, None] if self.labels_of(data) is None else self.labels_of(data)

    def fakes(i: int) -> Generated:
        return Generated(
            self.generator(of_class(noise[:, i], labels[i]), training=True), labels=labels[i]
        )

    losses = [
        self.update_critic(step, reals[i], fakes(i), mix[:, i])
        for i in range(self.batches_per_step)
    ]
    logs = {name: tf.add_n([each[name] for each in losses]) / len(losses) for name in losses[0]}
    return {**logs, "generator_loss": plain_generator_update(self, noise[:, -1], labels[-1])}


def plain_dcgan_step(self: DCGAN, data: Any) -> dict[str, Any]:
    """Gives the discriminator real and generated images in a pass each."""
    step = current_step()
    reals = from_uint8(images_of(data)[0])
    noise = step.normal((2, self.latent_dim), stream="noise")
    labels = None if self.labels_of(data) is None else self.labels_of(data)[0]
    fakes = self.generator(of_class(noise[:, 0], labels), training=True)
    with tf.GradientTape() as tape:
        on_reals = _cross_entropy(self.critic(of_class(reals, labels), training=True), real=True)
        on_fakes = _cross_entropy(self.critic(of_class(fakes, labels), training=True), real=False)
        loss = (on_reals + on_fakes) / step.global_batch_size
    variables = self.critic.trainable_variables
    self.critic_optimizer.apply(tape.gradient(loss, variables), variables)
    return {
        "discriminator_loss": loss,
        "generator_loss": plain_generator_update(self, noise[:, 1], labels),
    }


def plain_r3gan_step(self: R3GAN, data: Any) -> dict[str, Any]:
    """Takes a pass for each loss and each penalty of the paper's section 2."""
    step = current_step()
    reals = from_uint8(images_of(data)[0])
    noise = step.normal((2, self.latent_dim), stream="noise")
    size = step.global_batch_size
    labels = self.labels_of(data)[0]
    variables = self.critic.trainable_variables
    fakes = self.generator([noise[:, 0], labels], training=True)

    def critic(images: Any) -> Any:
        return self.critic([images, labels], training=True)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.math.log(1 + tf.exp(critic(fakes) - critic(reals)))) / size
        penalty = 0.0
        for images in (reals, fakes):
            with tf.GradientTape() as inner:
                inner.watch(images)
                scores = critic(images)
            penalty += tf.reduce_sum(inner.gradient(scores, images) ** 2) / size
        loss += self.settings.gradient_penalty_weight / 2 * penalty
    self.critic_optimizer.apply(tape.gradient(loss, variables), variables)
    with tf.GradientTape() as tape:
        generated = self.generator([noise[:, 1], labels], training=True)
        generator_loss = (
            tf.reduce_sum(tf.math.log(1 + tf.exp(critic(reals) - critic(generated)))) / size
        )
    variables = self.generator.trainable_variables
    self.generator_optimizer.apply(tape.gradient(generator_loss, variables), variables)
    self.average_generator(step)
    return {"critic_loss": loss, "gradient_penalty": penalty, "generator_loss": generator_loss}


@parametrize(
    "model, flags, many_rows",
    [
        ("wgan_gp", ("--critic_steps=3", "--diff_augment=color,translation,cutout"), False),
        slow("wgan_gp", ("--replicas=2",), True),
        slow("wgan_gp", ("--conditional", "--replicas=2"), False),
        slow("dcgan", ("--conditional",), True),
        slow("r3gan", ("--conditional", "--gradient_penalty_weight=3"), False),
    ],
)
def test_a_step_has_the_numbers_of_a_plain_one(
    model: str, flags: tuple[str, ...], many_rows: bool, monkeypatch: Patch
) -> None:
    """Compares all weights, moving statistics, averages and losses, after a few steps.

    many_rows: the layers run on all rows for the critic at once, as on GPUs. Without it, more
        replicas have the numbers of one: tests/trainer/models/test_models.py.
    """
    monkeypatch.setattr("trainer.models.image_layers._planned", [None] * many_rows)
    config = small(f"--model={model}", "--precision=float64", "--width=4", *flags)
    found, logs = run_steps(config, 5)
    monkeypatch.setattr(WGANGP, "train_step", plain_wgan_gp_step)
    monkeypatch.setattr(DCGAN, "train_step", plain_dcgan_step)
    monkeypatch.setattr(R3GAN, "train_step", plain_r3gan_step)
    plain, plain_logs = run_steps(config, 5)
    assert largest_difference(found, plain) < 1e-10
    assert logs.means() == pytest.approx(plain_logs.means(), rel=1e-10)


# Prints the smallest peak of TensorFlow's own allocator, with one operation after another: threads
# add to it by chance.
_PEAK = """
import sys
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)
from tests.support import build_setup, make_replicas, small
from tests.trainer.invariance.test_one_pass import DCGAN, plain_dcgan_step
if sys.argv.pop(1) == "plain":
    DCGAN.train_step = plain_dcgan_step
config = small(*sys.argv[1:])
setup = build_setup(config, make_replicas(config))
runner, rows = setup.step_runner(), setup.rows_from(0)
peaks = []
for step in range(4):
    tf.config.experimental.reset_memory_stats("CPU:0")
    runner(rows, step, 1)
    peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
print(min(peaks[1:]))
"""


@SLOW
def test_joined_passes_need_little_more_memory_than_plain_ones() -> None:
    """Found: 0.98 to 1.08; with the generator's passes joined too, 1.4."""
    flags = ("--model=dcgan", "--image_size=32", "--width=32", "--global_batch_size=128")
    joined, plain = (counted("-c", _PEAK, passes, *flags) for passes in ("joined", "plain"))
    assert joined < 1.15 * plain, (joined, plain)
