"""Follows https://keras.io/examples/vision/mnist_convnet/: a small convolutional classifier of digits."""

from typing import Any

import keras
import numpy as np
from keras import layers


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    return draw.random((64, 28, 28, 1)), keras.utils.to_categorical(draw.integers(0, 10, 64), 10)


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    return model
