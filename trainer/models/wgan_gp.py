"""WGAN-GP: Wasserstein GAN with gradient penalty. Gulrajani et al. 2017, https://arxiv.org/abs/1704.00028, Algorithm 1.

The critic has no batch norm: the penalty is on each example's own gradient. The generator's batch norm spans all
replicas. Losses and penalty are divided by the GLOBAL batch, so the number of replicas changes nothing.
"""

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from trainer.config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.distribution.averaging import update_average
from trainer.distribution.gradients import prepare
from trainer.distribution.step import StepContext, current_step
from trainer.images import from_uint8, to_uint8

_KERNEL = (
    4  # a multiple of the stride: no checkerboard (Odena et al. 2016, https://distill.pub/2016/deconv-checkerboard)
)


def build(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Generator, critic and their optimizers, for `config.image_size` and `config.channels`."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    synchronized = config.sync_batch_norm and replicas > 1
    generator = build_generator(config, synchronized=synchronized)
    average = build_generator(config, synchronized=synchronized)
    average.set_weights(generator.get_weights())
    return WGANGP(config, generator, average, build_critic(config), compile_generator=not synchronized)


def filters(config: TrainConfig) -> list[int]:
    """Filters of each resolution, widest image first: halved while even and above 4 pixels, at most 8 x width."""
    size = config.image_size
    result: list[int] = []
    while size % 2 == 0 and size > 4:
        size //= 2
        result.append(config.width * min(2 ** len(result), 8))
    return result


def build_generator(config: TrainConfig, *, synchronized: bool) -> keras.Model:
    """(rows, latent_dim) noise -> (rows, image_size, image_size, channels) in [-1, 1]."""
    widths = filters(config)
    base = config.image_size // 2 ** len(widths)
    noise = keras.Input((config.latent_dim,), name="noise")
    x = layers.Dense(base * base * widths[-1], use_bias=False)(noise)
    x = layers.Reshape((base, base, widths[-1]))(x)
    x = _norm_relu(x, synchronized)
    for width in reversed(widths[:-1]):
        x = layers.Conv2DTranspose(width, _KERNEL, strides=2, padding="same", use_bias=False)(x)
        x = _norm_relu(x, synchronized)
    x = layers.Conv2DTranspose(config.channels, _KERNEL, strides=2, padding="same")(x)
    images = layers.Activation("tanh", dtype=_full_precision(), name="images")(x)
    return keras.Model(noise, images, name="generator")


def build_critic(config: TrainConfig) -> keras.Model:
    """(rows, image_size, image_size, channels) in [-1, 1] -> (rows, 1) unbounded scores."""
    images = keras.Input((config.image_size, config.image_size, config.channels), name="images")
    x = images
    for width in filters(config):
        x = layers.Conv2D(width, _KERNEL, strides=2, padding="same")(x)
        x = layers.LeakyReLU(negative_slope=0.2)(x)
    x = layers.Flatten()(x)
    score = layers.Dense(1, dtype=_full_precision(), name="score")(x)
    return keras.Model(images, score, name="critic")


def _norm_relu(x: Any, synchronized: bool) -> Any:
    # A short memory (momentum) lets the statistics that sampling uses follow the weights.
    x = layers.BatchNormalization(momentum=0.9, synchronized=synchronized)(x)
    return layers.ReLU()(x)


def _adam(config: TrainConfig, network: keras.Model) -> Any:
    adam = keras.optimizers.Adam(config.learning_rate, beta_1=0.0, beta_2=0.9)
    return prepare(adam, network.trainable_variables, config.precision)


def _full_precision() -> str:
    """The type of weights: outputs and losses keep it where layers between compute in 16 bits."""
    return str(keras.config.dtype_policy().variable_dtype)


def gradient_norms(critic: Any, images: Any) -> Any:
    """L2 norm of the critic's gradient at each image, (rows,); its own gradient is 0, not NaN, where the norm is 0."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(images)
        scores = critic(images, training=True)
    gradients = tape.gradient(scores, images)
    squares = tf.reduce_sum(tf.square(gradients), axis=(1, 2, 3))
    positive = squares > 0
    return tf.where(positive, tf.sqrt(tf.where(positive, squares, tf.ones_like(squares))), tf.zeros_like(squares))


class WGANGP(keras.Model):
    """critic_steps critic updates, then one generator update, a step."""

    def __init__(
        self,
        config: TrainConfig,
        generator: keras.Model,
        generator_average: keras.Model,
        critic: keras.Model,
        *,
        compile_generator: bool,
    ) -> None:
        super().__init__(name="wgan_gp")
        self.generator, self.generator_average, self.critic = generator, generator_average, critic
        self.ema_decay = config.ema_decay
        self.batches_per_step = config.critic_steps
        self.latent_dim = config.latent_dim
        self.gradient_penalty_weight = config.gradient_penalty_weight
        self.generator_variables = [variable.value for variable in generator.trainable_variables]
        self.critic_variables = [variable.value for variable in critic.trainable_variables]
        self.critic_optimizer = _adam(config, critic)
        self.generator_optimizer = _adam(config, generator)
        # Traced once for all critic updates of a step. XLA takes no all-reduce: a synchronised generator stays outside.
        self._critic_gradients = tf.function(
            self.critic_gradients, jit_compile=config.jit_compile or None, autograph=False
        )
        self._generator_gradients = (
            tf.function(self.generator_gradients, jit_compile=True, autograph=False)
            if config.jit_compile and compile_generator
            else self.generator_gradients
        )

    def train_step(self, data: Any) -> dict[str, Any]:
        """data: (critic_steps, rows, height, width, channels) pixels in [0, 255]. Returns the losses."""
        step = current_step()
        reals = from_uint8(data)
        noise = step.normal((self.batches_per_step + 1, self.latent_dim), stream="noise")
        mix = step.uniform((self.batches_per_step, 1, 1, 1), stream="interpolation")
        updates = [self.update_critic(step, reals[i], noise[:, i], mix[:, i]) for i in range(self.batches_per_step)]
        logs = {name: tf.add_n([update[name] for update in updates]) / len(updates) for name in updates[0]}
        logs["generator_loss"] = self.update_generator(step, noise[:, -1])
        averaged, trained = self.generator_average.trainable_variables, self.generator.trainable_variables
        update_average(averaged, trained, self.ema_decay, step.step)
        return logs

    def update_critic(self, step: StepContext, reals: Any, noise: Any, mix: Any) -> dict[str, Any]:
        """One critic update on `reals` and as many fakes; returns its losses."""
        fakes = self.generator(noise, training=True)
        losses, gradients = self._critic_gradients(reals, fakes, mix, step.global_batch_size)
        self.critic_optimizer.apply(gradients, self.critic.trainable_variables)
        return losses

    def critic_gradients(self, reals: Any, fakes: Any, mix: Any, global_batch_size: int) -> Any:
        """Losses, and gradients of the scaled loss, over this replica's rows. mix: (rows, 1, 1, 1) in [0, 1]."""
        rows = reals.shape[0]
        mixed = fakes + mix * (reals - fakes)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.critic_variables)
            scores = self.critic(tf.concat([fakes, reals], axis=0), training=True)
            difference = tf.reduce_sum(scores[:rows]) - tf.reduce_sum(scores[rows:])
            excess = tf.reduce_sum(tf.square(gradient_norms(self.critic, mixed) - 1.0))
            wasserstein = difference / global_batch_size
            penalty = excess / global_batch_size
            loss = wasserstein + self.gradient_penalty_weight * penalty
            scaled = self.critic_optimizer.scale_loss(loss)
        losses = {"critic_loss": loss, "wasserstein_distance": -wasserstein, "gradient_penalty": penalty}
        return losses, tape.gradient(scaled, self.critic_variables)

    def update_generator(self, step: StepContext, noise: Any) -> Any:
        """One generator update; returns its loss."""
        loss, gradients = self._generator_gradients(noise, step.global_batch_size)
        self.generator_optimizer.apply(gradients, self.generator.trainable_variables)
        return loss

    def generator_gradients(self, noise: Any, global_batch_size: int) -> Any:
        """Loss, and gradients of the scaled loss, over this replica's rows."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.generator_variables)
            scores = self.critic(self.generator(noise, training=True), training=True)
            loss = -tf.reduce_sum(scores) / global_batch_size
            scaled = self.generator_optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, self.generator_variables)

    def sample(self, noise: Any) -> Any:
        """(count, latent_dim) noise -> (count, height, width, channels) uint8 images by the averaged generator."""
        return to_uint8(self.averaged_generator()(noise, training=False)).numpy()

    def templates(self) -> dict[str, keras.Model]:
        """What is saved: the averaged generator as the template model, the plain one and the critic beside it."""
        return {"model": self.averaged_generator(), "generator_raw": self.generator, "critic": self.critic}

    def serve(self, outputs: Any) -> Any:
        """A served generator gives uint8 images."""
        return to_uint8(outputs)

    def averaged_generator(self) -> keras.Model:
        """The averaged generator with the batch statistics of the trained one (they are averages already)."""
        pairs = zip(self.generator_average.non_trainable_variables, self.generator.non_trainable_variables, strict=True)
        for average, trained in pairs:
            average.assign(trained)
        return self.generator_average
