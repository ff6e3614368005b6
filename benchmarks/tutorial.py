"""Runs the peer loop that TensorFlow's tutorials write, on the same networks, optimizers and input
pipeline.

It is a Python loop over batches with one tf.function call per update; every loss is read back.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.processes import Run, Work, timed
from benchmarks.trainer_loop import networks, new_optimizers, peer_batches, work_of
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.run.export import plain_copy
from trainer.run.training_setup import TrainingSetup, build_setup


def make_candidate(config: TrainConfig, option: str = "") -> tuple[Run, Work]:
    """Returns the loop for the model of `config`."""
    setup = build_setup(config, make_replicas(config))
    model = setup.model
    loop = (
        gan_loop(setup) if hasattr(model, "critic") else classifier_loop(setup, plain_copy(model))
    )
    return timed(loop), work_of(networks(model), new_optimizers(model))


class GAN:
    """Computes the losses and updates of a WGAN-GP or DCGAN."""

    _entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def __init__(self, setup: TrainingSetup) -> None:
        self.config: Any = setup.config
        self.dcgan = self.config.model == "dcgan"
        self.generator, self.critic = (plain_copy(network) for network in networks(setup.model))
        self.generator_optimizer, self.critic_optimizer = new_optimizers(setup.model)

    def critic_loss(self, reals: Any, noise: Any, mix: Any) -> Any:
        """Takes reals (rows, height, width, channels) in [-1, 1], noise (rows, latent_dim), mix
        (rows, 1, 1, 1)."""
        fakes = self.generator(noise, training=True)
        real_scores = self.critic(reals, training=True)
        fake_scores = self.critic(fakes, training=True)
        if self.dcgan:
            on_reals = self._entropy(tf.ones_like(real_scores), real_scores)
            return on_reals + self._entropy(tf.zeros_like(fake_scores), fake_scores)
        mixed = mix * reals + (1.0 - mix) * fakes
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            scores = self.critic(mixed, training=True)
        norms = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(scores, mixed)), axis=[1, 2, 3]))
        penalty = tf.reduce_mean((norms - 1.0) ** 2)
        difference = tf.reduce_mean(fake_scores) - tf.reduce_mean(real_scores)
        return difference + self.config.gradient_penalty_weight * penalty

    def generator_loss(self, noise: Any) -> Any:
        """Takes noise (rows, latent_dim)."""
        scores = self.critic(self.generator(noise, training=True), training=True)
        return (
            self._entropy(tf.ones_like(scores), scores) if self.dcgan else -tf.reduce_mean(scores)
        )

    def train_critic(self, images: Any) -> Any:
        """Updates on (rows, height, width, channels) grey levels in [0, 255]; returns the loss."""
        rows = self.config.global_batch_size
        reals = tf.cast(images, tf.float32) / 127.5 - 1.0
        mix = tf.random.uniform((rows, 1, 1, 1))
        return _update(
            self.critic_optimizer, self.critic, lambda: self.critic_loss(reals, self._noise(), mix)
        )

    def train_generator(self) -> Any:
        """Updates once; returns the loss."""
        return _update(
            self.generator_optimizer, self.generator, lambda: self.generator_loss(self._noise())
        )

    def _noise(self) -> Any:
        return tf.random.normal((self.config.global_batch_size, self.config.latent_dim))


def gan_loop(setup: TrainingSetup) -> Callable[[int], None]:
    """Returns `run(steps)`: per step the critic updates, each on its own batch, then one of the
    generator."""
    trained = GAN(setup)
    batches = iter(peer_batches(setup, 1))
    train_critic = tf.function(trained.train_critic)
    train_generator = tf.function(trained.train_generator)

    def run(steps: int) -> None:
        for _ in range(steps):
            for _ in range(setup.schedule.batches_per_step):
                images, *_ = next(batches)
                float(train_critic(images[0]))
            float(train_generator())

    return run


def classifier_loop(setup: TrainingSetup, network: keras.Model) -> Callable[[int], None]:
    """Returns `run(steps)`, which trains `network` and updates the mean loss and the accuracy as
    tutorials do."""
    (optimizer,) = new_optimizers(setup.model)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mean_loss = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    batches = iter(peer_batches(setup, 1))

    def train_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            scores = network(tf.cast(images, tf.float32), training=True)
            loss = entropy(labels, scores)
        variables = network.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        mean_loss(loss)
        accuracy(labels, scores)
        return loss

    update = tf.function(train_step)

    def run(steps: int) -> None:
        for _ in range(steps):
            images, labels = next(batches)
            float(update(images[0], labels[0]))

    return run


def _update(optimizer: Any, network: keras.Model, compute_loss: Callable[[], Any]) -> Any:
    with tf.GradientTape() as tape:
        loss = compute_loss()
    variables = network.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss
