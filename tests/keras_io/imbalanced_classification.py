"""Follows https://keras.io/examples/structured_data/imbalanced_classification/: rare frauds, with class weights."""

from typing import Any

import keras
import numpy as np
from keras import layers

FLAGS = ("--class_weight=0:0.6,1:3.5",)


def network() -> keras.Model:
    model = keras.Sequential([keras.Input((30,)), layers.Dense(256, activation="relu")])
    for _ in range(2):
        model.add(layers.Dense(256, activation="relu"))
        model.add(layers.Dropout(0.3))
    model.add(layers.Dense(1, activation="sigmoid"))
    return model


def measures() -> list[keras.Metric]:
    counts = ("FalseNegatives", "FalsePositives", "TrueNegatives", "TruePositives", "Precision", "Recall")
    return [getattr(keras.metrics, name)() for name in counts]


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    return draw.normal(size=(64, 30)), (draw.random((64, 1)) < 0.15).astype("uint8")


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    model.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy", metrics=measures())
    return model
