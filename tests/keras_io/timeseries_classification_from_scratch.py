"""Follows https://keras.io/examples/timeseries/timeseries_classification_from_scratch/: engine
noise."""

from typing import Any

import keras
import numpy as np
from keras import layers


def network() -> keras.Model:
    series = keras.Input((500, 1))
    x = series
    for _ in range(3):
        x = layers.Conv1D(64, 3, padding="same")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return keras.Model(
        series, layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    )


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    return (draw.normal(size=(64, 500, 1)), draw.integers(0, 2, 64)), (
        draw.normal(size=(9, 500, 1)),
        np.arange(9) % 2,
    )


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    model.compile(
        "adam", "sparse_categorical_crossentropy", metrics=["sparse_categorical_accuracy"]
    )
    return model


def callbacks() -> list[keras.callbacks.Callback]:
    reduce = keras.callbacks.ReduceLROnPlateau(
        monitor="val_loss", factor=0.5, patience=20, min_lr=1e-4
    )
    return [reduce, keras.callbacks.EarlyStopping(monitor="val_loss", patience=50)]
