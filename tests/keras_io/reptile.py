"""Follows https://keras.io/examples/vision/reptile/: meta-learning by a loop of its own over
tasks."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def network() -> keras.Model:
    image = keras.Input((28, 28, 1))
    x = image
    for _ in range(4):
        x = layers.ReLU()(
            layers.BatchNormalization()(layers.Conv2D(64, 3, strides=2, padding="same")(x))
        )
    return keras.Model(image, layers.Dense(5, activation="softmax")(layers.Flatten()(x)))


class Reptile(keras.Model):
    """Has the published loop as its train_step: trains on one task, and moves the old weights a
    part of the way."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.inner = keras.optimizers.SGD(learning_rate=0.003)

    def train_step(self, data: Any) -> dict[str, Any]:
        images, labels = data
        old = self.network.get_weights()
        for _ in range(4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(labels, self.network(images))
                )
            gradients = tape.gradient(loss, self.network.trainable_weights)
            self.inner.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        new = self.network.get_weights()
        self.network.set_weights(
            [before + (after - before) * 0.25 for before, after in zip(old, new, strict=True)]
        )
        return {"loss": loss}


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    return draw.random((64, 28, 28, 1)), draw.integers(0, 5, 64)


def build(config: Any, dataset: Any) -> keras.Model:
    return Reptile()
