"""Follows https://keras.io/examples/vision/supervised-contrastive-learning/: pairs of the batch, by their labels."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops


class SupervisedContrastiveLoss(keras.losses.Loss):
    def __init__(self, temperature: float = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.temperature = temperature

    def call(self, labels: Any, features: Any) -> Any:
        features = ops.normalize(features, axis=1)
        logits = ops.matmul(features, ops.transpose(features)) / self.temperature
        same = ops.cast(ops.equal(labels, ops.transpose(labels)), logits.dtype)
        return keras.losses.categorical_crossentropy(same / ops.sum(same, axis=1, keepdims=True), logits, True)


def network() -> keras.Model:
    augment = keras.Sequential([
        layers.Normalization(), layers.RandomFlip("horizontal"), layers.RandomRotation(0.02)
    ])  # fmt: skip
    augment.layers[0].adapt(np.random.default_rng(1).random((8, 32, 32, 3)))
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, strides=4, activation="relu")(augment(inputs))
    x = layers.Dense(128, activation="relu")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, x, name="cifar10-encoder_with_projection-head")


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    return draw.random((64, 32, 32, 3)), draw.integers(0, 10, (64, 1))


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    model.compile(keras.optimizers.Adam(0.001), loss=SupervisedContrastiveLoss(0.05))
    return model
