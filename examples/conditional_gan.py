"""python -m trainer.task --model=examples.conditional_gan:build --data=digits --image_size=16 \
    --latent_dim=32 --learning_rate=1e-3 --steps=2000 --job_dir=runs/conditional_gan

Draws handwritten digits of a given class, with a train_step of its own: see
runs/conditional_gan/samples. The saved model takes noise and classes. What a train_step has to do
stands in trainer/user_code/interface.py.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.invariance.gradients import sum_and_build
from trainer.invariance.step import current_step


class ConditionalGAN(keras.Model):
    """Trains a generator and a discriminator, both of which are given the class."""

    def __init__(
        self, config: TrainConfig, shape: tuple[int, ...], classes: int, latent_dim: int
    ) -> None:
        super().__init__()
        self.latent_dim = latent_dim
        self.classes = classes
        noise = keras.Input((self.latent_dim,))
        image = keras.Input(shape)
        label = keras.Input((), dtype="int32")
        given = layers.Embedding(classes, 16)
        hidden = layers.Dense(256, activation="relu")(layers.Concatenate()([noise, given(label)]))
        pixels = layers.Dense(int(np.prod(shape)), activation="sigmoid")(hidden)
        self.generator = keras.Model([noise, label], layers.Reshape(shape)(pixels))
        x = layers.Concatenate()([layers.Flatten()(image), layers.Embedding(classes, 16)(label)])
        x = layers.Dense(256, activation="leaky_relu")(x)
        self.discriminator = keras.Model([image, label], layers.Dense(1)(x))
        self.networks = (self.generator, self.discriminator)
        # Built here, under the strategy's scope; they sum gradients over all replicas.
        self.optimizers = [
            sum_and_build(
                keras.optimizers.Adam(config.learning_rate, 0.5),
                network.trainable_variables,
                config.precision,
            )
            for network in self.networks
        ]

    def train_step(self, data: Any) -> dict[str, Any]:
        """Updates both networks once. data: images (rows, height, width, channels) from 0 to 255,
        labels (rows,)."""
        # in passes, with --micro_batches
        losses, gradients = current_step().accumulate(self.gradients, *data)
        for optimizer, network, found in zip(
            self.optimizers, self.networks, gradients, strict=True
        ):
            optimizer.apply(found, network.trainable_variables)
        return {"generator_loss": losses[0], "discriminator_loss": losses[1]}

    def gradients(self, images: Any, labels: Any) -> tuple[list[Any], list[Any]]:
        """Returns the losses of both networks, and their gradients."""
        step = current_step()
        # the same for a row on any number of replicas
        noise = step.normal((self.latent_dim,), stream="noise")
        with tf.GradientTape(persistent=True) as tape:
            drawn = self.generator([noise, labels])
            real, fake = (
                self.discriminator([each, labels])[:, 0] for each in (images / 255, drawn)
            )
            # softplus(-x) is the cross-entropy of the score x with "real". The mean is that of the
            # GLOBAL batch: reduce_mean would change with the replicas.
            losses = [
                step.mean(tf.nn.softplus(-fake)),
                step.mean(tf.nn.softplus(-real) + tf.nn.softplus(fake)),
            ]
            scaled = [
                one.scale_loss(loss) for one, loss in zip(self.optimizers, losses, strict=True)
            ]
        return losses, [
            tape.gradient(loss, [variable.value for variable in network.trainable_variables])
            for loss, network in zip(scaled, self.networks, strict=True)
        ]

    def sample(self, noise: Any) -> Any:
        """Returns uint8 images of the classes in turn, for (count, latent_dim) noise."""
        images = self.generator([noise, tf.range(len(noise)) % self.classes])
        return tf.cast(255 * images, tf.uint8)

    def templates(self) -> dict[str, keras.Model]:
        """Returns the models to save."""
        return {"model": self.generator, "discriminator": self.discriminator}


def build(config: TrainConfig, dataset: Dataset, *, latent_dim: int = 128) -> keras.Model:
    """Builds the model. Runs under the strategy's scope."""
    return ConditionalGAN(config, dataset.image_shape, len(dataset.class_names), latent_dim)
