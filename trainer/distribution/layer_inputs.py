"""Tells a layer that draws random numbers, within a step, which axis is one of rows, by hiding the size of that axis.

As under `fit`, the layer then asks for numbers by row with a tensor as first size, and for all others with a number.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from trainer.distribution.step import StepContext, running_step
from trainer.log import warn_once

_NO_ROWS = "draws random numbers for inputs whose first axis is not one of rows"
_OTHER_SIZE = "draws random numbers for inputs whose first axis, of unknown size, is not one of rows"
_UNKNOWN_PARTS = "draws for several parts of each row, whose order is not known: reshape (rows, parts, …) before it"


@dataclass(frozen=True)
class LayerInputs:
    """Describes the inputs of the layer that runs: their first axis has `parts` entries for each row, if any."""

    parts: int  # 0 if it is not one of rows
    size: int | None = None  # of the first axis; None if it is hidden from the layer
    together: bool = True  # whether the parts of one row are neighbours
    doubt: str = ""  # why numbers drawn by the layer may depend on the number of replicas


_current: ContextVar[LayerInputs | None] = ContextVar("layer_inputs", default=None)


def layer_inputs() -> LayerInputs | None:
    """Returns what is known of the inputs of the layer that runs, if it is one that `draw_by_row` was called for.

    None where the size of their first axis is known only while the step runs, as after `RaggedTensor.to_tensor`.
    """
    return _current.get()


def draw_by_row(layer: keras.layers.Layer, path: str) -> None:
    """Makes `layer` draw by row if it holds SeedGenerators, from streams that are named by `path`.

    Its class and its weights stay. Its `call` hides the size of the first axis from it, as `fit` does: the layer then
    asks for numbers by row with a tensor as first size, and for others with a number.
    """
    generators = _generators(layer)
    for index, generator in enumerate(generators):
        generator.name = f"{path}#{index}" if index else path
    if isinstance(layer, keras.layers.RNN):  # which draws the masks of its cells before its loop
        generators = [each for cell in _cells(layer.cell) if _drops(cell) for each in _generators(cell)]
    elif isinstance(layer, keras.Model) or hasattr(layer, "state_size"):
        return
    if generators and "call" not in vars(layer):
        layer.call = _hiding_rows(layer.call, path, type(layer).__module__.startswith("keras."))


def _generators(layer: keras.layers.Layer) -> list[keras.random.SeedGenerator]:
    """Returns the generators that the layer itself holds, not those of its layers."""
    values = (
        each for value in vars(layer).values() for each in (value if isinstance(value, (list, tuple)) else [value])
    )
    return list({id(each): each for each in values if isinstance(each, keras.random.SeedGenerator)}.values())


def _cells(cell: Any) -> list[Any]:
    return [inner for each in getattr(cell, "cells", []) for inner in _cells(each)] or [cell]


def _drops(cell: Any) -> bool:
    rates = [getattr(cell, name) for name in ("dropout", "recurrent_dropout") if hasattr(cell, name)]
    return not rates or any(rates)


def _hiding_rows(original: Callable[..., Any], path: str, keeps_size: bool) -> Callable[..., Any]:
    """Returns `original`, a layer's call, with the size of the first axis hidden in a step.

    `keeps_size`: the outputs get that size again. Keras's layers keep it; one of a user's may not.
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        step = running_step()
        if step is None:
            return original(*args, **kwargs)
        with _given(step, path, (args, kwargs)) as (args, kwargs, size):
            outputs = original(*args, **kwargs)
        return keras.tree.map_structure(lambda each: _sized(each, size), outputs) if keeps_size and size else outputs

    return call


@contextmanager
def _given(step: StepContext, path: str, given: Any) -> Iterator[Any]:
    """Yields what a layer is called with, with the size of the first axis of rows hidden, while the layer runs."""
    tensors = [each for each in keras.tree.flatten(given) if isinstance(each, tf.Tensor) and each.shape.rank]
    found = _describe(tensors[0], step.rows) if tensors else LayerInputs(0, doubt=_NO_ROWS)
    size = tensors[0].shape[0] if tensors and found and found.size is None else None
    args, kwargs = keras.tree.map_structure(lambda each: hide_size(each, size), given) if size else given
    token = _current.set(found)
    try:
        yield args, kwargs, size
    finally:
        _current.reset(token)


def _describe(tensor: Any, rows: int) -> LayerInputs | None:
    size = tensor.shape[0]
    if size is None:
        return _current.get()
    if size % rows:
        return LayerInputs(0, size, doubt=_NO_ROWS)
    if tf.executing_eagerly():
        return LayerInputs(size // rows, size)
    together = size == rows or _neighbours(tensor, rows)
    return LayerInputs(size // rows, None, together is not False, _UNKNOWN_PARTS if together is None else "")


def hide_size(value: Any, size: int) -> Any:
    """Returns a tensor whose first axis has this size as one of unknown size; everything else unchanged."""
    if not isinstance(value, tf.Tensor) or not value.shape.rank or value.shape[0] != size:
        return value
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=[None, *value.shape[1:]])


def _sized(value: Any, size: int) -> Any:
    if isinstance(value, tf.Tensor) and value.shape.rank and value.shape[0] is None:
        value.set_shape([size, *value.shape[1:]])
    return value


def _neighbours(tensor: Any, rows: int) -> bool | None:
    """Returns whether the parts of a row are neighbours in `tensor`, by the operation that made the first axis.

    A reshape of (rows, parts, …) makes neighbours; a concatenation of (rows, …) does not. None if it is neither.
    """
    size = tensor.shape[0]
    while True:
        sizes = [each.shape[0] if each.shape.rank else None for each in tensor.op.inputs]
        if tensor.op.type == "Reshape" and sizes[0] != size:
            return True if sizes[0] == rows else None
        if tensor.op.type == "ConcatV2" and set(sizes[:-1]) == {rows}:
            return False
        if tensor.op.type == "Tile" and sizes[0] == rows:
            return False
        if size not in sizes:
            return None
        tensor = tensor.op.inputs[sizes.index(size)]


def name_dependence(step: StepContext, path: str, why: str) -> None:
    """Warns once that numbers drawn for `path` differ on several replicas, if there are several."""
    if step.rows != step.global_batch_size:
        warn_once(f"the result depends on the number of replicas: {path} {why}")


def name_other_size(step: StepContext, path: str, size: Any) -> None:
    """Warns as `name_dependence`, while the step runs, if `size`, a tensor, is not the number of rows."""

    def warn() -> None:
        name_dependence(step, path, _OTHER_SIZE)

    if step.rows != step.global_batch_size:
        tf.cond(tf.equal(size, step.rows), tf.no_op, lambda: tf.numpy_function(warn, [], []))
