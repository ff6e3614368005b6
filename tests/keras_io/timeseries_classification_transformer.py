"""Follows https://keras.io/examples/timeseries/timeseries_classification_transformer/: attention over engine noise."""

from typing import Any

import keras
import numpy as np
from keras import layers


def block(x: Any, size: int, heads: int, hidden: int, rate: float) -> Any:
    attended = layers.MultiHeadAttention(key_dim=size, num_heads=heads, dropout=rate)(x, x)
    attended = layers.LayerNormalization(epsilon=1e-6)(layers.Dropout(rate)(attended)) + x
    y = layers.Dropout(rate)(layers.Conv1D(hidden, 1, activation="relu")(attended))
    return layers.LayerNormalization(epsilon=1e-6)(layers.Conv1D(x.shape[-1], 1)(y)) + attended


def network(length: int) -> keras.Model:
    series = keras.Input((length, 1))
    x = series
    for _ in range(2):
        x = block(x, size=32, heads=4, hidden=4, rate=0.25)
    x = layers.GlobalAveragePooling1D(data_format="channels_last")(x)
    x = layers.Dropout(0.4)(layers.Dense(128, activation="relu")(x))
    return keras.Model(series, layers.Dense(2, activation="softmax")(x))


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    return draw.normal(size=(64, 500, 1)), draw.integers(0, 2, 64)


def build(config: Any, dataset: Any) -> keras.Model:
    model = network(500)
    rate = keras.optimizers.Adam(learning_rate=1e-4)
    model.compile(rate, "sparse_categorical_crossentropy", metrics=["sparse_categorical_accuracy"])
    return model
