"""Holds labels against numbers: an operation is run on two halves of a batch and on the whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.proof.labels import INDEX, ROWS, SAME, SUM, UNIFORM, ZERO, Label
from trainer.proof.walk import Walk

ROWS_OF_HALF = 5
COUNTS = (ROWS_OF_HALF, 2 * ROWS_OF_HALF)


@dataclass(frozen=True)
class Given:
    """Describes an input: what it is to the whole batch, and its sizes, those of rows for one block
    and neighbour."""

    label: Label
    sizes: tuple[int, ...]
    dtype: Any = tf.float64
    low: float = 0.1
    high: float = 0.9

    def shape(self, rows: int) -> tuple[int, ...]:
        """Returns the shape for so many rows."""
        if not self.label.has_rows:
            return self.sizes
        length = self.label.blocks * self.label.inner * rows
        return (*self.sizes[: self.label.axis], length, *self.sizes[self.label.axis + 1 :])

    def values(self, draw: Any) -> tuple[Any, Any, Any]:
        """Returns the input of both halves and of the whole."""
        label = self.label
        whole = self._drawn(draw, self.shape(COUNTS[1]))
        halves = [whole, whole]
        if label.kind == ROWS:
            halves = cut(whole, label)
        elif label.kind == UNIFORM:
            whole = spread(whole, label, whole)
            halves = cut(whole, label)
        elif label.kind == SUM:
            halves = [self._drawn(draw, whole.shape) for _ in range(2)]
            whole = np.add(*halves)
        first, second = halves
        return first, second, (whole * 2.0**label.power).astype(whole.dtype)

    def _drawn(self, draw: Any, shape: tuple[int, ...]) -> Any:
        kind = self.dtype.as_numpy_dtype
        if self.dtype.is_bool:
            return draw.random(shape) < 0.5
        if self.dtype.is_integer:
            return draw.integers(int(self.low), int(self.high), shape).astype(kind)
        return draw.uniform(self.low, self.high, shape).astype(kind)


def cut(whole: Any, label: Label) -> list[Any]:
    """Returns both halves of what has rows: of each block the first and the second half of its
    rows."""
    before = whole.shape[: label.axis]
    length = whole.shape[label.axis]
    after = whole.shape[label.axis + 1 :]
    blocks = whole.reshape(*before, label.blocks, 2, length // (2 * label.blocks), *after)
    return [
        np.take(blocks, half, label.axis + 1).reshape(*before, length // 2, *after)
        for half in (0, 1)
    ]


def spread(values: Any, label: Label, like: Any) -> Any:
    """Returns the first of the rows of `values` as often as `like` has rows."""
    return np.repeat(np.take(values, [0], label.axis), like.shape[label.axis], label.axis)


def equal(one: Any, other: Any) -> bool:
    if one.dtype.kind not in "fc":
        return np.array_equal(one, other)
    return one.shape == other.shape and np.allclose(one, other, 1e-6, 1e-9, equal_nan=True)


def holds(label: Label, first: Any, second: Any, whole: Any) -> bool:
    """Returns whether what the halves and the whole gave is what a label says."""
    expected = whole if label.power == 0 else whole / 2.0**label.power
    if label.is_number and not np.array_equal(np.ravel(first), np.arange(ROWS_OF_HALF)):
        return False
    # The places of the second half go on where those of the first end.
    if label.places == INDEX:
        second = second + ROWS_OF_HALF * (np.arange(second.shape[-1]) == 0)
    elif label.places:
        second = second + ROWS_OF_HALF * label.places
    parts = (first, second, expected)
    if label.has_rows and label.axis >= expected.ndim:
        return False
    if label.kind == ROWS:
        length = label.blocks * label.inner * ROWS_OF_HALF
        if (first.shape[label.axis], expected.shape[label.axis]) != (length, 2 * length):
            return False
        return all(map(equal, parts, cut(expected, label)))
    if label.kind == SUM:
        return equal(first + second, expected)
    if label.kind == ZERO:
        return not any(map(np.any, parts))
    if label.kind == UNIFORM:
        return all(equal(each, spread(expected, label, each)) for each in parts)
    assert label.kind == SAME
    return equal(first, expected) and equal(second, expected)


def labels_of(
    build: Callable[..., Any], given: Sequence[Given], draw: Any
) -> list[tuple[Label, bool]]:
    """Returns the label of each output of `build(rows, *inputs)`, and whether the numbers are what
    it says."""
    functions = []
    for rows in COUNTS:
        specs = [tf.TensorSpec(each.shape(rows), each.dtype) for each in given]
        function = tf.function(
            lambda *tensors, rows=rows: tf.nest.flatten(build(rows, *tensors)), autograph=False
        )
        functions.append(function.get_concrete_function(*specs))
    nothing = [None] * len(given)
    graphs = functions[0].graph, functions[1].graph
    labels, _ = Walk(COUNTS).graphs(graphs, [each.label for each in given], nothing, nothing)
    inputs = [*zip(*(each.values(draw) for each in given), strict=True)]
    results = [
        [np.asarray(result) for result in function(*map(tf.constant, arguments))]
        for function, arguments in zip(
            (functions[0], functions[0], functions[1]), inputs, strict=True
        )
    ]
    outputs = zip(labels, *results, strict=True)
    return [(label, label.is_bad or holds(label, *values)) for label, *values in outputs]
