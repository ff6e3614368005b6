"""Follows https://keras.io/examples/nlp/addition_rnn/: sums of two numbers, read and written by characters."""

from typing import Any

import keras
import numpy as np
from keras import layers

CHARACTERS, DIGITS = "0123456789+ ", 3
LENGTH = 2 * DIGITS + 1


def network() -> keras.Model:
    return keras.Sequential([
        keras.Input((LENGTH, len(CHARACTERS))),
        layers.LSTM(128), layers.RepeatVector(DIGITS + 1), layers.LSTM(128, return_sequences=True),
        layers.Dense(len(CHARACTERS), activation="softmax"),
    ])  # fmt: skip


def encoded(texts: list[str], length: int) -> Any:
    indices = [[CHARACTERS.index(character) for character in text.ljust(length)] for text in texts]
    return np.eye(len(CHARACTERS), dtype=bool)[indices]


# Glue


def data(config: Any) -> Any:
    pairs = np.random.default_rng(0).integers(0, 10**DIGITS, (64, 2))
    sums = encoded([str(first + second) for first, second in pairs], DIGITS + 1)
    return encoded([f"{first}+{second}"[::-1] for first, second in pairs], LENGTH), sums


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    return model
