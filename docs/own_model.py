"""Shows a model and data of your own, to start from: an autoencoder of two-dimensional rings.

    python -m trainer.check --model=docs.own_model:build --data=docs.own_model:rings --image_size=16
    python -m trainer.task --model=docs.own_model:build --data=docs.own_model:rings --image_size=16 \
        --learning_rate=1e-3 --steps=300 --job_dir=runs/rings

The contract is in trainer/interface.py. `build` and `rings` may live in any package that
Python can import where the job starts.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from trainer.config.train_config import TrainConfig
from trainer.data.dataset import Arrays, Dataset
from trainer.distribution.gradients import sum_and_build
from trainer.distribution.step import current_step
from trainer.models.layers import full_precision


def rings(config: TrainConfig) -> Dataset:
    """Returns 1,000 grey images of one ring each: uint8, (examples, image_size, image_size, channels)."""
    draw = np.random.default_rng(config.seed)
    y, x = np.mgrid[: config.image_size, : config.image_size] / config.image_size
    centres, radii = draw.uniform(0.3, 0.7, (1000, 2)), draw.uniform(0.1, 0.3, 1000)
    distance = np.hypot(x - centres[:, 0, None, None], y - centres[:, 1, None, None])
    ring = np.exp(-(((distance - radii[:, None, None]) / 0.05) ** 2))
    images = np.repeat((255 * ring).astype(np.uint8)[..., None], config.channels, axis=-1)
    return Dataset("rings", Arrays(images))


class Denoiser(keras.Model):
    """Removes noise from images. `current_step()` provides random numbers and means for the current step."""

    def __init__(self, config: TrainConfig, network: keras.Model) -> None:
        super().__init__()
        self.network = network
        # Built here, under the strategy's scope; it sums gradients over all replicas.
        self.adam = sum_and_build(
            keras.optimizers.Adam(config.learning_rate), network.trainable_variables, config.precision
        )

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains on this replica's rows: (rows, height, width, channels), 0 to 255. Returns sums over all replicas."""
        step = current_step()
        images = data / 255
        noisy = images + 0.3 * step.normal(images.shape[1:], stream="noise")  # the same for a row on any replica
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(self.network(noisy, training=True) - images), axis=(1, 2, 3))
            loss = step.mean(errors)  # divided by the GLOBAL batch: reduce_mean would change with the replicas
            scaled = self.adam.scale_loss(loss)  # changes the loss only in mixed_float16
        variables = [variable.value for variable in self.network.trainable_variables]
        self.adam.apply(tape.gradient(scaled, variables), self.network.trainable_variables)
        return {"loss": loss}

    def templates(self) -> dict[str, keras.Model]:
        """Returns the models to save: only the network."""
        return {"model": self.network}


def build(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Builds the model. Runs under the strategy's scope."""
    images = keras.Input(dataset.image_shape)
    x = layers.Conv2D(config.width, 3, padding="same", activation="relu")(images)
    x = layers.Conv2D(config.width, 3, padding="same", activation="relu")(x)
    return Denoiser(
        config, keras.Model(images, layers.Conv2D(config.channels, 3, padding="same", dtype=full_precision())(x))
    )
