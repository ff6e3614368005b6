"""DCGAN: Radford et al. 2016, https://arxiv.org/abs/1511.06434.

Batch norm in both networks, spanning all replicas; weights from N(0, 0.02); Adam(2e-4, 0.5) in its recipes. One
discriminator update and one generator update a step, each with noise of its own (Goodfellow et al. 2014, Algorithm 1).
"""

from typing import Any

import keras
import tensorflow as tf

from trainer.config.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.images import from_uint8
from trainer.distribution.step import current_step
from trainer.models.gan import GAN, build_critic, build_generator
from trainer.models.layers import synchronized


def build(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Generator, discriminator and their optimizers, for `config.image_size` and `config.channels`."""
    return DCGAN(config, dataset, synchronized=synchronized(config))


class DCGAN(GAN):
    """Cross-entropy between real and generated images. `synchronized`: batch norm spans the replicas."""

    def __init__(self, config: TrainConfig, dataset: Dataset, *, synchronized: bool) -> None:
        generator, average = (build_generator(config, synchronized=synchronized, initializer=_normal) for _ in range(2))
        critic = build_critic(config, batch_norm=True, synchronized=synchronized, initializer=_normal)
        super().__init__(config, dataset, generator, average, critic, batches_per_step=1, beta_1=0.5, beta_2=0.999)
        compiled = config.jit_compile and not synchronized  # XLA takes no all-reduce
        self._critic_gradients = self._maybe_compiled(self.critic_gradients, compiled)
        self._generator_gradients = self._maybe_compiled(self.generator_gradients, compiled)

    def train_step(self, data: Any) -> dict[str, Any]:
        """data: (1, rows, height, width, channels) pixels in [0, 255]. Returns the losses."""
        step = current_step()
        noise = step.normal((2, self.latent_dim), stream="noise")
        critic_loss, gradients = self._critic_gradients(from_uint8(data[0]), noise[:, 0], step.global_batch_size)
        self.critic_optimizer.apply(gradients, self.critic.trainable_variables)
        generator_loss, gradients = self._generator_gradients(noise[:, 1], step.global_batch_size)
        self.generator_optimizer.apply(gradients, self.generator.trainable_variables)
        self.average_generator(step)
        return {"discriminator_loss": critic_loss, "generator_loss": generator_loss}

    def critic_gradients(self, reals: Any, noise: Any, global_batch_size: int) -> Any:
        """Loss, and a gradient of the scaled loss for each critic variable, over this replica's rows.

        reals: (rows, height, width, channels) in [-1, 1]; noise: (rows, latent_dim). Real and fake rows are normalised
        apart.
        """
        fakes = self.generator(noise, training=True)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.critic_variables)
            on_reals = _cross_entropy(self.critic(reals, training=True), real=True)
            on_fakes = _cross_entropy(self.critic(fakes, training=True), real=False)
            loss = (on_reals + on_fakes) / global_batch_size
            scaled = self.critic_optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, self.critic_variables)

    def generator_gradients(self, noise: Any, global_batch_size: int) -> Any:
        """Loss, and a gradient of the scaled loss for each generator variable, over this replica's rows.

        noise: (rows, latent_dim).
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.generator_variables)
            scores = self.critic(self.generator(noise, training=True), training=True)
            loss = _cross_entropy(scores, real=True) / global_batch_size
            scaled = self.generator_optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, self.generator_variables)

    @staticmethod
    def _maybe_compiled(function: Any, compiled: bool) -> Any:
        return tf.function(function, jit_compile=True, autograph=False) if compiled else function


def _normal() -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=0.02)


def _cross_entropy(scores: Any, *, real: bool) -> Any:
    """Summed over rows; the target is 1 for real images and 0 for generated ones."""
    target = tf.ones_like(scores) if real else tf.zeros_like(scores)
    return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(target, scores))
