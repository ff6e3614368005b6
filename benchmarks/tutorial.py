"""The peer: a WGAN-GP loop as tutorials write it, on the same networks.

A Python loop over steps; one tf.function call a critic update and one a generator update; every loss read back.
"""

from typing import Any

import keras
import tensorflow as tf

from trainer.config import TrainConfig
from trainer.data.dataset import Arrays, Dataset
from trainer.models.gan import build_critic, build_generator


class TutorialLoop:
    """`run(steps)` trains for that many generator steps and returns the real images read."""

    def __init__(self, config: TrainConfig, dataset: Dataset) -> None:
        self.config = config
        self.generator = build_generator(config, synchronized=False)
        self.critic = build_critic(config)
        self.generator_optimizer = keras.optimizers.Adam(config.learning_rate, beta_1=0.0, beta_2=0.9)
        self.critic_optimizer = keras.optimizers.Adam(config.learning_rate, beta_1=0.0, beta_2=0.9)
        assert isinstance(dataset.train, Arrays)
        images = dataset.train.images.astype("float32") / 127.5 - 1.0
        batches = tf.data.Dataset.from_tensor_slices(images).shuffle(dataset.train.count).repeat()
        batches = batches.batch(config.global_batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
        self.batches = iter(batches)
        self.train_critic = tf.function(self._train_critic)
        self.train_generator = tf.function(self._train_generator)

    def run(self, steps: int) -> int:
        """Trains; reads every loss, as one does to print it."""
        for _ in range(steps):
            for _ in range(self.config.critic_steps):
                float(self.train_critic(next(self.batches)))
            float(self.train_generator())
        return steps * self.config.critic_steps * self.config.global_batch_size

    def _train_critic(self, reals: Any) -> Any:
        """One critic update; returns its loss."""
        rows = self.config.global_batch_size
        fakes = self.generator(tf.random.normal((rows, self.config.latent_dim)), training=True)
        mix = tf.random.uniform((rows, 1, 1, 1))
        mixed = reals + mix * (fakes - reals)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                mixed_scores = self.critic(mixed, training=True)
            gradients = inner.gradient(mixed_scores, mixed)
            norms = tf.sqrt(tf.reduce_sum(tf.square(gradients), axis=[1, 2, 3]))
            penalty = tf.reduce_mean((norms - 1.0) ** 2)
            real_scores, fake_scores = self.critic(reals, training=True), self.critic(fakes, training=True)
            loss = tf.reduce_mean(fake_scores) - tf.reduce_mean(real_scores)
            loss += self.config.gradient_penalty_weight * penalty
        variables = self.critic.trainable_variables
        self.critic_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def _train_generator(self) -> Any:
        """One generator update; returns its loss."""
        noise = tf.random.normal((self.config.global_batch_size, self.config.latent_dim))
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(self.critic(self.generator(noise, training=True), training=True))
        variables = self.generator.trainable_variables
        self.generator_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss
