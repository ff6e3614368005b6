"""Hides the number of rows from a layer that draws random numbers, so that its draws by row can be told from others.

A layer that runs under `fit` does not know how many rows it gets: it asks for numbers by row with a tensor as the first
size, and for numbers that all rows share with integers. A step knows its number of rows, and an integer of that value
could mean either. While such a layer runs in a step, the size of the first axis of its inputs is therefore hidden.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from trainer.invariance.step import running_step


@dataclass(frozen=True)
class LayerInputs:
    """Describes the inputs of the layer that runs."""

    size: int  # of the first axis
    hidden: bool  # whether the layer sees that size as unknown: it is the number of rows
    of_keras: bool  # whether the layer is one of Keras's own


_current: ContextVar[LayerInputs | None] = ContextVar("layer_inputs", default=None)


def layer_inputs() -> LayerInputs | None:
    """Returns the inputs of the layer that runs, if `draw_by_row` was called for it.

    None where the size of their first axis is known only while the step runs, as after `RaggedTensor.to_tensor`.
    """
    return _current.get()


def draw_by_row(layer: keras.layers.Layer, path: str) -> None:
    """Makes `layer` draw by row if it holds SeedGenerators, from streams that are named by `path`.

    Its class and its weights stay; its `call` is replaced. A recurrent layer draws the dropout of its cells before it
    loops over time, and keeps the size of its first axis. Models keep theirs too: only layers in them hide it.
    """
    generators = _generators(layer)
    for index, generator in enumerate(generators):
        generator.name = f"{path}#{index}" if index else path
    recurrent, cell = isinstance(layer, keras.layers.RNN), hasattr(layer, "state_size")
    draws = generators and not cell and not isinstance(layer, keras.Model)
    if (recurrent or draws) and "call" not in vars(layer):
        layer.call = _describing_inputs(
            layer.call, hide=not recurrent, of_keras=type(layer).__module__.startswith("keras.")
        )


def _generators(layer: keras.layers.Layer) -> list[keras.random.SeedGenerator]:
    """Returns the generators that the layer itself holds, not those of its layers."""
    attributes = (value if isinstance(value, (list, tuple)) else [value] for value in vars(layer).values())
    generators = (item for items in attributes for item in items if isinstance(item, keras.random.SeedGenerator))
    return list({id(generator): generator for generator in generators}.values())


def _describing_inputs(original: Callable[..., Any], *, hide: bool, of_keras: bool) -> Callable[..., Any]:
    """Returns `original`, a layer's call, which describes its inputs in `layer_inputs` while it runs in a step.

    `hide`: it does not see the number of rows. Outputs of a layer of Keras get that size again, as it keeps rows apart.
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        step, tensors = running_step(), keras.tree.flatten((args, kwargs))
        sizes = [tensor.shape[0] for tensor in tensors if isinstance(tensor, tf.Tensor) and tensor.shape.rank]
        if step is None or tf.executing_eagerly() or not sizes or sizes[0] is None:
            return original(*args, **kwargs)
        inputs = LayerInputs(sizes[0], hide and sizes[0] == step.rows, of_keras)
        if inputs.hidden:
            args, kwargs = keras.tree.map_structure(lambda value: hide_size(value, step.rows), (args, kwargs))
        token = _current.set(inputs)
        try:
            outputs = original(*args, **kwargs)
        finally:
            _current.reset(token)
        if inputs.hidden and of_keras:
            keras.tree.map_structure(lambda value: _set_size(value, step.rows), outputs)
        return outputs

    return call


def hide_size(value: Any, size: int) -> Any:
    """Returns a tensor whose first axis has this size as one of unknown size; everything else unchanged."""
    if not isinstance(value, tf.Tensor) or not value.shape.rank or value.shape[0] != size:
        return value
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=[None, *value.shape[1:]])


def _set_size(value: Any, size: int) -> None:
    if isinstance(value, tf.Tensor) and value.shape.rank and value.shape[0] is None:
        value.set_shape([size, *value.shape[1:]])
