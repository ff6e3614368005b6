"""Predicts as `model.predict` does on one device, whatever the number of replicas, and names the
outputs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.cluster.strategy import Replicas
from trainer.data.examples import AnyExamples, Array, InSequence
from trainer.invariance.internals import all_layers


def predict(
    model: keras.Model,
    replicas: Replicas,
    examples: AnyExamples,
    batch_size: int,
    step_data: Callable[[tuple[Any, ...]], Any],
) -> Any:
    """Returns predict_step's outputs for all rows, in order: tensors (rows, …) in its nest.

    The examples are cut into batches as `model.predict(…, batch_size=…)` cuts them, the last one is
    filled up, and the replicas of this machine take whole batches in turn: a row's output does not
    depend on the other rows of its batch. Only x is used. Nothing in the model changes: a layer
    that draws at random draws the same for each batch. Raises UserError if the model does not
    return a row for each row.
    """
    run = round_of(model, replicas, batch_size, step_data)
    return predict_by(run, replicas, examples, batch_size)


def round_of(
    model: keras.Model,
    replicas: Replicas,
    batch_size: int,
    step_data: Callable[[tuple[Any, ...]], Any],
) -> Callable[[list[Any]], list[Any]]:
    """Returns a function from replicas' iterators to predict_step of the next batch of each."""

    def filled(leaf: Any) -> Any:  # repeats the last row of the last batch
        more = tf.repeat(leaf[-1:], batch_size - tf.shape(leaf)[0], axis=0)
        return tf.ensure_shape(tf.concat([leaf, more], axis=0), (batch_size, *leaf.shape[1:]))

    def one_round(used: list[Any]) -> list[Any]:
        outputs = []
        # the last round may have fewer
        for device, iterator in zip(replicas.devices, used, strict=False):
            with tf.device(device):
                x = step_data(tf.nest.map_structure(filled, next(iterator)[:1]))
                outputs.append(outputs_of(model, x if isinstance(x, tuple) else (x,)))
        return outputs

    return tf.function(partial(one_round), autograph=False)  # see StepRunner


def predict_by(
    run: Callable[[list[Any]], list[Any]],
    replicas: Replicas,
    examples: AnyExamples,
    batch_size: int,
) -> Any:
    """Returns what `predict` does, by the function of `round_of`."""
    batches = math.ceil(examples.count / batch_size)
    takers = min(replicas.local, batches)
    if isinstance(examples, InSequence):  # a second reading may give another order
        iterators = [iter(examples.in_order(batch_size))] * takers
    else:
        iterators = [iter(examples.in_order(batch_size, takers, index)) for index in range(takers)]

    parts = []
    for first in range(0, batches, takers):
        for index, outputs in enumerate(run(iterators[: batches - first]), first):
            rows = min(batch_size, examples.count - index * batch_size)
            for leaf in tf.nest.flatten(outputs):
                if leaf.shape[:1] != (batch_size,):
                    shape = tuple(leaf.shape)
                    raise UserError(
                        f"the model returns {shape} for {batch_size} rows: one row each is needed"
                    )
            with tf.device("CPU:0"):  # a GPU may not have room for all
                parts.append(tf.nest.map_structure(lambda leaf, rows=rows: leaf[:rows], outputs))
    with tf.device("CPU:0"):
        return tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *parts)


def outputs_of(model: keras.Model, x: tuple[Any, ...]) -> Any:
    """Returns what predict_step gives for (x,): the one way from rows to answers. Nothing in the
    model changes."""
    return outputs_of_calls(model, x, 1)[0]


def outputs_of_calls(model: keras.Model, x: tuple[Any, ...], calls: int) -> list[Any]:
    """Returns several predict_steps of (x,), each from the first state of stateful layers."""
    outputs = []
    with keras.StatelessScope():
        for _ in range(calls):
            for layer in all_layers(model):
                if getattr(layer, "stateful", False):
                    layer.reset_state()
            outputs.append(model.predict_step(x))
    return outputs


def named_outputs(outputs: Any, names: Sequence[str]) -> Iterator[tuple[str, Array]]:
    """Yields (name, array) for each array in a nest of outputs, or raises UserError.

    A single output is `predictions`. Others have `names`, those of the model's outputs, or their
    keys in the nest, or output_N by position; names of inner nests are joined by dots.
    """
    if isinstance(outputs, list | tuple) and len(names) == len(outputs) == len({*names}):
        outputs = dict(zip(names, outputs, strict=True))
    for path, value in keras.tree.flatten_with_path(outputs):
        if not isinstance(value, tf.Tensor):
            raise UserError(
                f"the model returns {type(value).__name__}: only tensors with a row for each"
                " example are kept"
            )
        # NumPy's files have no bfloat16.
        array = (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()
        if array.dtype.kind not in "biufc":
            raise UserError(
                f"the model returns {value.dtype.name}, not numbers: only numbers are kept"
            )
        key, *inner = path or ("predictions",)
        yield ".".join(map(str, (f"output_{key}" if isinstance(key, int) else key, *inner))), array


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Writes arrays as numpy.savez does, to a file of any name."""
    with open(path, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # allow_pickle is no array
