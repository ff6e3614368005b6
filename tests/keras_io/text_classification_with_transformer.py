"""Follows https://keras.io/examples/nlp/text_classification_with_transformer/: a block of a transformer over tokens."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

TOKENS, WORDS, WIDTH, HEADS = 200, 20000, 32, 2


class TransformerBlock(layers.Layer):
    def __init__(self, width: int, heads: int, hidden: int, rate: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.settings = {"width": width, "heads": heads, "hidden": hidden, "rate": rate}
        self.attention = layers.MultiHeadAttention(heads, width)
        self.dense = keras.Sequential([layers.Dense(hidden, activation="relu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.drops = [layers.Dropout(rate) for _ in range(2)]

    def call(self, words: Any, training: bool = False) -> Any:
        attended = self.norms[0](words + self.drops[0](self.attention(words, words), training=training))
        return self.norms[1](attended + self.drops[1](self.dense(attended), training=training))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


class TokenAndPosition(layers.Layer):
    def __init__(self, length: int, words: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.settings = {"length": length, "words": words, "width": width}
        self.tokens, self.positions = layers.Embedding(words, width), layers.Embedding(length, width)

    def call(self, words: Any) -> Any:
        return self.tokens(words) + self.positions(ops.arange(0, ops.shape(words)[-1]))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


def network() -> keras.Model:
    words = keras.Input((TOKENS,))
    x = TokenAndPosition(TOKENS, WORDS, WIDTH)(words)
    x = layers.GlobalAveragePooling1D()(TransformerBlock(WIDTH, HEADS, 32)(x))
    x = layers.Dense(20, activation="relu")(layers.Dropout(0.1)(x))
    return keras.Model(words, layers.Dense(2, activation="softmax")(layers.Dropout(0.1)(x)))


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    return draw.integers(0, WORDS, (64, TOKENS)), draw.integers(0, 2, 64)


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
