"""Follows https://keras.io/examples/generative/lstm_character_level_text_generation/: the next character of a text."""

from typing import Any

import keras
import numpy as np
from keras import layers

LENGTH, STEP = 40, 3
TEXT = "supposing that truth is a woman - what then? is there not ground for suspecting that all philosophers " * 3
CHARACTERS = sorted(set(TEXT))


def network() -> keras.Model:
    layer = [layers.LSTM(128), layers.Dense(len(CHARACTERS), activation="softmax")]
    return keras.Sequential([keras.Input((LENGTH, len(CHARACTERS))), *layer])


# Glue


def data(config: Any) -> Any:
    codes = np.eye(len(CHARACTERS), dtype=bool)[[CHARACTERS.index(character) for character in TEXT]]
    starts = range(0, len(TEXT) - LENGTH, STEP)
    return np.stack([codes[start : start + LENGTH] for start in starts]), codes[LENGTH::STEP]


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    model.compile(loss="categorical_crossentropy", optimizer=keras.optimizers.RMSprop(learning_rate=0.01))
    return model
