"""Follows https://keras.io/examples/vision/siamese_contrastive/: the distance of two digits."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops


@keras.saving.register_keras_serializable("siamese")
def distance(both: Any) -> Any:
    squares = ops.sum(ops.square(both[0] - both[1]), axis=1, keepdims=True)
    return ops.sqrt(ops.maximum(squares, keras.backend.epsilon()))


def network() -> keras.Model:
    image = keras.Input((28, 28, 1))
    x = layers.BatchNormalization()(image)
    for filters in (4, 16):
        x = layers.AveragePooling2D(2)(layers.Conv2D(filters, 5, activation="tanh")(x))
    x = layers.BatchNormalization()(layers.Flatten()(x))
    tower = keras.Model(image, layers.Dense(10, activation="tanh")(x))
    pair = [keras.Input((28, 28, 1)) for _ in range(2)]
    merged = layers.Lambda(distance, output_shape=(1,))([tower(one) for one in pair])
    return keras.Model(pair, layers.Dense(1, activation="sigmoid")(layers.BatchNormalization()(merged)))


def loss(margin: float = 1) -> Any:
    def contrastive_loss(y_true: Any, y_pred: Any) -> Any:
        margins = ops.square(ops.maximum(margin - y_pred, 0))
        return ops.mean((1 - y_true) * ops.square(y_pred) + y_true * margins)

    return contrastive_loss


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    pairs = draw.random((2, 64, 28, 28, 1))
    return [pairs[0], pairs[1]], draw.integers(0, 2, 64).astype("float32")


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    model.compile("RMSprop", loss(margin=1), metrics=["accuracy"])
    return model
