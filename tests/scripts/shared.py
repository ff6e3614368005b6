"""Holds what the scripts of this folder share: a small table in float64, and the writing of what
they found."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

ROWS = 57

keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(ROWS, 6))
y = (x[:, :3].sum(1) > 0).astype("int32") + (x[:, 0] > 1)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network() -> keras.Sequential:
    return keras.Sequential([keras.layers.Dense(9, "tanh"), keras.layers.Dense(3)])


def write(model: keras.Model, *histories: keras.callbacks.History, **others: Any) -> None:
    """Writes the weights, the histories and other numbers to the file that the command names."""
    found = {
        **others,
        "histories": [history.history for history in histories],
        "epochs": [history.epoch for history in histories],
        "weights": [np.asarray(weight).tolist() for weight in model.get_weights()],
    }
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)


class Interrupt(keras.callbacks.Callback):
    """Sends a signal after the first epoch if the command names a mark, unless an earlier start has
    left it."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        marks = [Path(mark) for mark in sys.argv[2:]]
        if marks and not marks[0].exists():
            marks[0].write_text("sent")
            os.kill(os.getpid(), signal.SIGTERM)
