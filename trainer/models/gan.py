"""What GANs share: a convolutional generator and its opponent, the averaged generator, samples and templates."""

from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from trainer.config.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.images import to_uint8
from trainer.distribution.averaging import update_average
from trainer.distribution.gradients import sum_and_build
from trainer.distribution.step import StepContext
from trainer.models.image_layers import KERNEL, STRIDE, ImageConv2D, ImageConv2DTranspose
from trainer.models.layers import batch_norm, full_precision
from trainer.models.optimizers import FusedAdam, learning_rate

Initializer = Callable[[], keras.initializers.Initializer]  # a new one a layer, so that no two begin alike

_GLOROT = keras.initializers.GlorotUniform


def filters(config: TrainConfig) -> list[int]:
    """Filters of each resolution, widest image first: halved while even and above 4 pixels, at most 8 x width."""
    size = config.image_size
    result: list[int] = []
    while size % 2 == 0 and size > 4:
        size //= 2
        result.append(config.width * min(2 ** len(result), 8))
    return result


def build_generator(config: TrainConfig, *, synchronized: bool, initializer: Initializer = _GLOROT) -> keras.Model:
    """(rows, latent_dim) noise -> (rows, image_size, image_size, channels) in [-1, 1]."""
    widths = filters(config)
    base = config.image_size // 2 ** len(widths)

    def doubled(x: Any, width: int) -> Any:
        kernel = {"kernel_initializer": initializer(), "use_bias": False}  # a bias before batch norm would do nothing
        return layers.Conv2DTranspose(width, KERNEL, strides=STRIDE, padding="same", **kernel)(x)

    noise = keras.Input((config.latent_dim,), name="noise")
    x = layers.Dense(base * base * widths[-1], use_bias=False, kernel_initializer=initializer())(noise)
    x = layers.Reshape((base, base, widths[-1]))(x)
    x = layers.ReLU()(_batch_norm(x, synchronized))
    for width in reversed(widths[:-1]):
        x = layers.ReLU()(_batch_norm(doubled(x, width), synchronized))
    x = ImageConv2DTranspose(config.channels, kernel_initializer=initializer())(x)
    images = layers.Activation("tanh", dtype=full_precision(), name="images")(x)
    return keras.Model(noise, images, name="generator")


def build_critic(
    config: TrainConfig, *, batch_norm: bool = False, synchronized: bool = False, initializer: Initializer = _GLOROT
) -> keras.Model:
    """(rows, image_size, image_size, channels) in [-1, 1] -> (rows, 1) unbounded scores.

    `batch_norm`: on every layer but the first, as in DCGAN.
    """
    images = keras.Input((config.image_size, config.image_size, config.channels), name="images")
    x = images
    for depth, width in enumerate(filters(config)):
        normed = batch_norm and depth > 0  # and then a bias would do nothing
        kernel = {"kernel_initializer": initializer(), "use_bias": not normed}
        if depth == 0:
            x = ImageConv2D(width, **kernel)(x)
        else:
            x = layers.Conv2D(width, KERNEL, strides=STRIDE, padding="same", **kernel)(x)
        x = _batch_norm(x, synchronized) if normed else x
        x = layers.LeakyReLU(negative_slope=0.2)(x)
    x = layers.Flatten()(x)
    score = layers.Dense(1, dtype=full_precision(), name="score", kernel_initializer=initializer())(x)
    return keras.Model(images, score, name="critic")


def _batch_norm(x: Any, synchronized: bool) -> Any:
    # A short memory (momentum) lets the statistics that sampling uses follow the weights.
    return batch_norm(synchronized=synchronized)(momentum=0.9)(x)


class GAN(keras.Model):
    """A generator, its moving average, and its opponent. A subclass says how they train.

    `batches_per_step`: global batches that one step reads. `beta_1`, `beta_2`: of both Adams.
    """

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        generator: keras.Model,
        generator_average: keras.Model,
        critic: keras.Model,
        *,
        batches_per_step: int,
        beta_1: float,
        beta_2: float,
    ) -> None:
        super().__init__(name=config.model.replace(":", "_").replace(".", "_"))
        generator_average.set_weights(generator.get_weights())
        self.generator, self.generator_average, self.critic = generator, generator_average, critic
        self.batches_per_step, self.latent_dim, self.ema_decay = batches_per_step, config.latent_dim, config.ema_decay
        self.generator_variables = [variable.value for variable in generator.trainable_variables]
        self.critic_variables = [variable.value for variable in critic.trainable_variables]

        def adam(network: keras.Model, updates_per_step: int) -> Any:
            rate = learning_rate(config, dataset, batches_per_step, updates_per_step)
            optimizer = FusedAdam(rate, beta_1=beta_1, beta_2=beta_2)
            return sum_and_build(optimizer, network.trainable_variables, config.precision)

        self.critic_optimizer, self.generator_optimizer = adam(critic, batches_per_step), adam(generator, 1)

    def average_generator(self, step: StepContext) -> None:
        """Moves the average towards the generator. Called once at the end of each step."""
        averaged, trained = self.generator_average.trainable_variables, self.generator.trainable_variables
        update_average(averaged, trained, self.ema_decay, step.step)

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
