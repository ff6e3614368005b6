"""A user's file that draws at its import, without a seed of its own."""

from typing import Any

import numpy as np
from keras import Input, Model, Sequential, layers
from keras.callbacks import Callback
from numpy.random import default_rng

ORDER = np.random.permutation(64)


def data(config: Any) -> Any:
    x = default_rng(0).normal(size=(64, 4))[ORDER]
    return x, x.sum(axis=1)


def build(config: Any, dataset: Any) -> Model:
    model = Sequential([Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def callbacks() -> list[Callback]:
    return []
