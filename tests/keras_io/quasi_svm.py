"""Follows https://keras.io/examples/keras_recipes/quasi_svm/: a hinge loss on random Fourier features."""

import math
from typing import Any

import keras
import numpy as np
from keras import layers, ops


class RandomFourierFeatures(layers.Layer):
    """Approximates a Gaussian kernel; Keras 3 has it no longer."""

    def __init__(self, output_dim: int, scale: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.output_dim, self.scale = output_dim, scale

    def build(self, shape: Any) -> None:
        frequencies, phases = keras.initializers.RandomNormal(seed=1), keras.initializers.RandomUniform(0, 2 * math.pi)
        self.kernel = self.add_weight((shape[-1], self.output_dim), frequencies, trainable=False, name="kernel")
        self.bias = self.add_weight((self.output_dim,), phases, trainable=False, name="bias")

    def call(self, x: Any) -> Any:
        return ops.cos(ops.matmul(x, self.kernel) / self.scale + self.bias)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "output_dim": self.output_dim, "scale": self.scale}


def network() -> keras.Model:
    features = RandomFourierFeatures(output_dim=4096, scale=10.0)
    return keras.Sequential([keras.Input((784,)), features, layers.Dense(units=10)])


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    return draw.random((64, 784)), keras.utils.to_categorical(draw.integers(0, 10, 64), 10)


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    accuracy = keras.metrics.CategoricalAccuracy(name="acc")
    model.compile(keras.optimizers.Adam(learning_rate=1e-3), keras.losses.hinge, metrics=[accuracy])
    return model
