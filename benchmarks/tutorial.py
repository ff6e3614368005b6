"""The peer: training as TensorFlow's tutorials write it, on the same networks, optimizers and input pipeline.

A Python loop over batches; one tf.function call an update; every loss read back.
"""

from typing import Any

import keras
import tensorflow as tf

from benchmarks.ours import batches_alike, networks, new_optimizers, work_of
from benchmarks.turns import Run, Work, timed
from trainer.build import TrainingSetup, build_setup
from trainer.config.train_config import TrainConfig
from trainer.distribution.strategy import make_replicas
from trainer.export import plain_copy


def contender(config: TrainConfig, option: str = "") -> tuple[Run, Work]:
    """The loop for the model of `config`."""
    assembly = build_setup(config, make_replicas(config))
    model = assembly.model
    loop = gan_loop(assembly) if hasattr(model, "critic") else classifier_loop(assembly, plain_copy(model))
    return timed(loop), work_of(networks(model), new_optimizers(model))


class WGANGP:
    """Losses and updates of a WGAN-GP with gradient penalty."""

    def __init__(self, assembly: TrainingSetup) -> None:
        self.config = assembly.config
        self.generator, self.critic = (plain_copy(network) for network in networks(assembly.model))
        self.generator_optimizer, self.critic_optimizer = new_optimizers(assembly.model)

    def critic_loss(self, reals: Any, noise: Any, mix: Any) -> Any:
        """reals: (rows, height, width, channels) in [-1, 1]; mix: (rows, 1, 1, 1) in [0, 1]."""
        fakes = self.generator(noise, training=True)
        mixed = mix * reals + (1.0 - mix) * fakes
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            scores = self.critic(mixed, training=True)
        norms = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(scores, mixed)), axis=[1, 2, 3]))
        penalty = tf.reduce_mean((norms - 1.0) ** 2)
        real_scores, fake_scores = self.critic(reals, training=True), self.critic(fakes, training=True)
        difference = tf.reduce_mean(fake_scores) - tf.reduce_mean(real_scores)
        return difference + self.config.gradient_penalty_weight * penalty

    def generator_loss(self, noise: Any) -> Any:
        """noise: (rows, latent_dim)"""
        return -tf.reduce_mean(self.critic(self.generator(noise, training=True), training=True))

    def train_critic(self, images: Any) -> Any:
        """One update on (rows, height, width, channels) grey levels in [0, 255]; returns the loss."""
        rows = self.config.global_batch_size
        reals, mix = tf.cast(images, tf.float32) / 127.5 - 1.0, tf.random.uniform((rows, 1, 1, 1))
        with tf.GradientTape() as tape:
            loss = self.critic_loss(reals, self._noise(), mix)
        _update(self.critic_optimizer, tape, loss, self.critic)
        return loss

    def train_generator(self) -> Any:
        """One update; returns the loss."""
        with tf.GradientTape() as tape:
            loss = self.generator_loss(self._noise())
        _update(self.generator_optimizer, tape, loss, self.generator)
        return loss

    def _noise(self) -> Any:
        return tf.random.normal((self.config.global_batch_size, self.config.latent_dim))


class DCGAN(WGANGP):
    """The same with cross-entropy between real and generated images."""

    _entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def critic_loss(self, reals: Any, noise: Any, mix: Any) -> Any:
        """`mix` is not used."""
        fakes = self.generator(noise, training=True)
        real_scores, fake_scores = self.critic(reals, training=True), self.critic(fakes, training=True)
        on_reals = self._entropy(tf.ones_like(real_scores), real_scores)
        return on_reals + self._entropy(tf.zeros_like(fake_scores), fake_scores)

    def generator_loss(self, noise: Any) -> Any:
        """noise: (rows, latent_dim)"""
        scores = self.critic(self.generator(noise, training=True), training=True)
        return self._entropy(tf.ones_like(scores), scores)


def gan(assembly: TrainingSetup) -> WGANGP:
    """The peer of the model in `assembly`, on plain copies of its networks."""
    return {"wgan_gp": WGANGP, "dcgan": DCGAN}[assembly.config.model](assembly)


def gan_loop(assembly: TrainingSetup) -> Any:
    """`run(steps)`: critic updates, each on a batch of its own, then one of the generator, a step."""
    trained, batches = gan(assembly), iter(batches_alike(assembly, 1))
    train_critic, train_generator = tf.function(trained.train_critic), tf.function(trained.train_generator)

    def run(steps: int) -> None:
        for _ in range(steps):
            for _ in range(assembly.schedule.batches_per_step):
                images, *_ = next(batches)
                float(train_critic(images[0]))
            float(train_generator())

    return run


def classifier_loop(assembly: TrainingSetup, network: keras.Model) -> Any:
    """`run(steps)` trains `network`, and keeps the mean loss and the accuracy as tutorials do."""
    (optimizer,) = new_optimizers(assembly.model)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mean_loss, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    batches = iter(batches_alike(assembly, 1))

    def train_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            scores = network(tf.cast(images, tf.float32), training=True)
            loss = entropy(labels, scores)
        _update(optimizer, tape, loss, network)
        mean_loss(loss)
        accuracy(labels, scores)
        return loss

    update = tf.function(train_step)

    def run(steps: int) -> None:
        for _ in range(steps):
            images, labels = next(batches)
            float(update(images[0], labels[0]))

    return run


def _update(optimizer: Any, tape: Any, loss: Any, network: keras.Model) -> None:
    variables = network.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
