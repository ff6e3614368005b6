"""Follows https://keras.io/examples/nlp/bidirectional_lstm_imdb/: two bidirectional LSTMs over a review."""

from typing import Any

import keras
import numpy as np
from keras import layers

WORDS, LENGTH = 20000, 200


def network() -> keras.Model:
    words = keras.Input((None,), dtype="int32")
    x = layers.Embedding(WORDS, 128)(words)
    x = layers.Bidirectional(layers.LSTM(64, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(64))(x)
    return keras.Model(words, layers.Dense(1, activation="sigmoid")(x))


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    return draw.integers(0, WORDS, (64, LENGTH)), draw.integers(0, 2, 64)


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model
