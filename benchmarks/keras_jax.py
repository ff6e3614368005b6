"""Runs the peer Keras `fit` on JAX, on networks of benchmarks/networks.py. Imports no TensorFlow."""

import inspect
import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

from benchmarks.fit_clock import Clock
from benchmarks.processes import Run, Work
from trainer.base.settings.train_config import TrainConfig


def make_candidate(config: TrainConfig, option: str) -> tuple[Run, Work]:
    """Returns `fit`, which JAX compiles, with `option` steps per execution."""
    keras.config.set_dtype_policy(config.precision)
    arrays, model, clock = _made(config.data, config), _made(config.model, config, None), Clock()
    model.compile(model.optimizer, model.loss, metrics=["accuracy"], steps_per_execution=int(option))
    batches = _batches(arrays, config.global_batch_size)

    def run(steps: int) -> float:
        model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=[clock])
        return clock.seconds

    return run, {}


def _made(name: str, config: TrainConfig, *arguments: Any) -> Any:
    """Returns what the named function makes, with its own settings."""
    module, _, function = name.partition(":")
    make = getattr(import_module(module), function)
    own = {name: getattr(config, name) for name, of in inspect.signature(make).parameters.items()
           if of.kind is inspect.Parameter.KEYWORD_ONLY}  # fmt: skip
    return make(config, *arguments, **own)


def _batches(arrays: Any, rows: int) -> Iterator[Any]:
    """Yields shuffled batches without an end."""
    draw = np.random.default_rng(0)
    while True:
        for numbers in np.split(draw.permutation(len(arrays[0])), range(rows, len(arrays[0]), rows)):
            if len(numbers) == rows:
                yield tuple(array[numbers] for array in arrays)
