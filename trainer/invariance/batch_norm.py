"""Makes batch norm, in place of Keras's own code, span all replicas, in fewer operations, and by groups of rows.

Several passes of a network whose weights stay the same can be one: each layer of `in_one_pass` normalises every group
of rows by its own statistics, as a pass of its own does, but sums those of all groups over replicas at once.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.invariance.normalization import GroupedRows, Normalized, normalized
from trainer.invariance.step import running_step

_groups: ContextVar[int] = ContextVar("groups", default=1)


@contextmanager
def separate_groups(count: int) -> Iterator[None]:
    """Makes batch norm within the block treat its inputs as `count` groups of equally many rows, in order.

    As in `count` passes, one a group. Only for layers of `normalize_in_place` that keep Keras's `call`.
    """
    token = _groups.set(count)
    try:
        yield
    finally:
        _groups.reset(token)


def in_one_pass(network: keras.Model, *parts: GroupedRows) -> list[Any]:
    """Returns the outputs of a chain of layers in training for each of `parts`, as in one pass a group, in order.

    The layers run on each of the parts; only those of batch norm know of the others.
    """
    for layer in network.layers[1:]:  # the first is the input
        if isinstance(layer, keras.layers.BatchNormalization):
            with tf.name_scope(layer.name):
                outputs = _normalized_in_training(layer, parts)
        else:
            outputs = [layer(part.values) for part in parts]
        parts = tuple(GroupedRows(values, part.groups) for values, part in zip(outputs, parts, strict=True))
    return [part.values for part in parts]


def normalize_in_place(layer: keras.layers.BatchNormalization, *, synchronized: bool) -> None:
    """Makes a batch norm layer normalise by `trainer.invariance.normalization` in training, up to rounding as Keras.

    `synchronized`: over the rows of all replicas. A class of a user's with a `call` of its own keeps that.
    """
    layer.synchronized = layer.synchronized or synchronized
    original = layer.call
    of_keras = getattr(original, "__func__", None) is keras.layers.BatchNormalization.call
    if not of_keras or getattr(layer, "renorm", False):
        return

    @functools.wraps(original)
    def call(inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Returns the normalised inputs and updates the moving statistics."""
        if not training or not layer.trainable:
            return original(inputs, training=training, mask=mask)
        return _normalized_in_training(layer, [GroupedRows(inputs, _groups.get())], mask)[0]

    layer.call = call


def _normalized_in_training(layer: Any, parts: Sequence[GroupedRows], mask: Any = None) -> list[Any]:
    """Returns the outputs for each of `parts`, and moves the layer's averages."""
    result = normalized(layer, parts, mask)
    _move_averages(layer, result)
    return result.outputs


def _move_averages(layer: Any, result: Normalized) -> None:
    """Moves the layer's averages as one update for each group, in order, would.

    After n groups, average <- m^n average + sum over i of (1 - m) m^(n - 1 - i) value_i. All passes of micro-batches
    make one such update: value_i is then the mean over the passes, of which each adds its share.
    """
    groups, momentum, step = result.means.shape[0], layer.momentum, running_step()
    number, passes = (step.pass_number, step.passes) if step else (0, 1)
    keep = momentum**groups if number == 0 else 1.0
    weights = (1.0 - momentum) * momentum ** np.arange(groups - 1.0, -1.0, -1.0)
    for average, values in ((layer.moving_mean, result.means), (layer.moving_variance, result.variances)):
        moved = values * tf.constant(weights[:, None] / passes, values.dtype)
        moved = tf.squeeze(moved, 0) if groups == 1 else tf.reduce_sum(moved, 0)
        average.assign(average * keep + moved)
