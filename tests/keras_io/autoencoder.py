"""Follows https://keras.io/examples/vision/autoencoder/: a convolutional autoencoder that removes noise."""

from typing import Any

import keras
import numpy as np
from keras import layers


def network() -> keras.Model:
    image = keras.Input((28, 28, 1))
    x = image
    for _ in range(2):
        x = layers.Conv2D(32, 3, activation="relu", padding="same")(x)
        x = layers.MaxPooling2D(2, padding="same")(x)
    for _ in range(2):
        x = layers.Conv2DTranspose(32, 3, strides=2, activation="relu", padding="same")(x)
    return keras.Model(image, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x))


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    clean = draw.random((64, 28, 28, 1))
    return np.clip(clean + 0.4 * draw.normal(size=clean.shape), 0, 1), clean


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    model.compile("adam", "binary_crossentropy")
    return model
