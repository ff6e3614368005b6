"""Follows https://keras.io/examples/structured_data/wide_deep_cross_networks/: deep and cross, of numbers and text."""

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


def encoded(columns: dict[str, Any]) -> Any:
    found = [ops.expand_dims(columns[name], -1) for name in NUMBERS]
    for name, words in VOCABULARY.items():
        lookup = layers.StringLookup(vocabulary=words, mask_token=None, num_oov_indices=0)
        found.append(layers.Embedding(len(words), int(math.sqrt(len(words))))(lookup(columns[name])))
    return layers.concatenate(found)


def network() -> keras.Model:
    columns = inputs()
    start = cross = encoded(columns)
    for _ in HIDDEN:
        cross = start * layers.Dense(cross.shape[-1])(cross) + cross
    deep = start
    for units in HIDDEN:
        deep = layers.Dropout(RATE)(layers.ReLU()(layers.BatchNormalization()(layers.Dense(units)(deep))))
    merged = layers.concatenate([layers.BatchNormalization()(cross), deep])
    return keras.Model(columns, layers.Dense(CLASSES, activation="softmax")(merged))


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    numbers = {name: draw.integers(0, 90, 64) for name in NUMBERS}
    text = {name: draw.choice(words, 64) for name, words in VOCABULARY.items()}
    return tf.data.Dataset.from_tensor_slices(({**numbers, **text}, draw.integers(0, CLASSES, 64))).batch(20)


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"])
    return model
