"""Follows https://keras.io/examples/structured_data/wide_deep_cross_networks/: numbers and text."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

NUMBERS = [f"distance_{number}" for number in range(10)]
VOCABULARY = {"Soil_Type": [f"soil_{n}" for n in range(40)], "Wilderness_Area": [f"area_{n}" for n in range(4)]}
CLASSES, HIDDEN, RATE = 7, (32, 32), 0.1


def inputs() -> dict[str, Any]:
    numbers = {name: keras.Input((), name=name, dtype="float32") for name in NUMBERS}
    return {**numbers, **{name: keras.Input((), name=name, dtype="string") for name in VOCABULARY}}


def encoded(columns: dict[str, Any], *, embed: bool = False) -> Any:
    found = []
    for name, column in columns.items():
        if name not in VOCABULARY:
            found.append(ops.expand_dims(column, -1))
            continue
        words = VOCABULARY[name]
        mode = "int" if embed else "multi_hot"
        lookup = layers.StringLookup(vocabulary=words, mask_token=None, num_oov_indices=0, output_mode=mode)
        if embed:
            found.append(layers.Embedding(len(words), int(math.sqrt(len(words))))(lookup(column)))
        else:
            found.append(lookup(ops.expand_dims(column, -1)))
    return layers.concatenate(found)


def _deep(x: Any) -> Any:
    for units in HIDDEN:
        x = layers.ReLU()(layers.BatchNormalization()(layers.Dense(units)(x)))
        x = layers.Dropout(RATE)(x)
    return x


def wide_and_deep() -> keras.Model:
    columns = inputs()
    wide = layers.BatchNormalization()(encoded(columns))
    merged = layers.concatenate([wide, _deep(encoded(columns, embed=True))])
    return keras.Model(columns, layers.Dense(CLASSES, activation="softmax")(merged))


def deep_and_cross() -> keras.Model:
    columns = inputs()
    start = cross = encoded(columns, embed=True)
    for _ in HIDDEN:
        cross = start * layers.Dense(cross.shape[-1])(cross) + cross
    merged = layers.concatenate([layers.BatchNormalization()(cross), _deep(start)])
    return keras.Model(columns, layers.Dense(CLASSES, activation="softmax")(merged))


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    numbers = {name: draw.integers(0, 90, 64) for name in NUMBERS}
    text = {name: draw.choice(words, 64) for name, words in VOCABULARY.items()}
    return tf.data.Dataset.from_tensor_slices(({**numbers, **text}, draw.integers(0, CLASSES, 64))).batch(20)


def build(config: Any, dataset: Any, network: Any = deep_and_cross) -> keras.Model:
    model = network()
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"])
    return model
