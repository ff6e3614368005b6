"""Holds one operation as both traces have it, for the rules."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.proof.labels import MIXED, ROWS, SAME, UNIFORM, UNKNOWN, ZERO, Label, Mixes, NoRule, Shape, Shapes

Values = tuple[Any, Any]  # of a tensor in both traces, as arrays
BROADCASTING = {
    "Add",
    "AddV2",
    "Sub",
    "Mul",
    "RealDiv",
    "Maximum",
    "Minimum",
    "SelectV2",
    "Cast",
    "Identity",
    "Square",
    "Neg",
    "AddN",
    "ZerosLike",
    "OnesLike",
}
MOST_VALUES = 4096  # of a tensor that is computed while labels are found


@dataclass(frozen=True)
class Node:
    """Holds an operation of both graphs, with what is known of its inputs."""

    operations: tuple[Any, Any]
    labels: list[Label]  # of the inputs
    known: list[Values | None]  # of the inputs: their values, where they are constants
    shapes: list[Shapes]  # of the inputs, in both traces
    rows: tuple[int, int]

    @property
    def type(self) -> str:
        """Returns the operation's type, such as MatMul."""
        return self.operations[0].type

    def attribute(self, name: str) -> Any:
        """Returns an attribute. Raises NoRule if the traces have different ones."""
        first, second = (operation.get_attr(name) for operation in self.operations)
        if first != second:
            raise NoRule(f"{name} follows from the number of rows")
        return first

    def shape(self, number: int) -> Shape:
        """Returns the shape of an input in the first trace. Raises NoRule if its number of axes is unknown."""
        if (shape := self.shapes[number][0]) is None:
            raise NoRule("a shape is unknown")
        return shape

    def value(self, number: int) -> Any:
        """Returns the value of an input that both traces share. Raises NoRule if there is none."""
        first, second = self.values(number)
        if not np.array_equal(first, second):
            raise NoRule("an axis or a place follows from the number of rows")
        return first

    def values(self, number: int) -> Values:
        """Returns the values of an input in both traces. Raises NoRule if they are unknown."""
        values = self.known[number]
        if values is None:
            raise NoRule("an axis, a size or a place is computed while the step runs")
        return values

    def whole(self, number: int = 0) -> Label:
        """Returns an input's label: what is uniform as rows, zeros as what their shape says."""
        label = self.settled(number)
        if label.kind != UNIFORM:
            return label
        size = self.shape(number)[label.axis]
        if size is None or size % self.rows[0]:
            raise NoRule("a number of rows is unknown")
        return label._replace(kind=ROWS, blocks=size // self.rows[0])

    def settled(self, number: int) -> Label:
        """Returns an input's label: zeros as uniform if an axis is as long as there are rows, else as the same."""
        label = self.labels[number]
        if label.kind != ZERO:
            return label
        scaled = scaled_axes(self.shapes[number])
        if len(scaled) > 1:
            raise Mixes("pairs the rows of one replica with each other")
        return Label(UNIFORM, scaled[0]) if scaled else Label(SAME)

    def output_shapes(self, number: int = 0) -> Shapes:
        """Returns an output's shape in both traces, as the graphs have it."""
        first, second = (sizes_of(operation.outputs[number].shape) for operation in self.operations)
        if not (first and second and (None in first or None in second)):
            return first, second
        try:
            return self._inferred(0), self._inferred(1)
        except (NoRule, ValueError):
            return first, second

    def _inferred(self, trace: int) -> Shape:
        """Returns the first output's shape in a trace by what is known here and was not when the step was traced."""
        shapes = [pair[trace] for pair in self.shapes]
        if self.type in ("Reshape", "BroadcastTo") and -1 not in (sizes := self.values(1)[trace]):
            return tuple(map(int, sizes))
        if any(shape is None or None in shape for shape in shapes):
            raise NoRule("a shape is unknown")
        given = [shape for shape in shapes if shape is not None]
        if self.type in ("Sum", "Mean", "Max", "Min"):
            axes = {int(axis) % len(given[0]) for axis in np.ravel(self.values(1)[trace])}
            reduced = [1 if axis in axes else size for axis, size in enumerate(given[0])]
            keeps = self.attribute("keep_dims")
            return tuple(size for axis, size in enumerate(reduced) if keeps or axis not in axes)
        if self.type in BROADCASTING:
            return np.broadcast_shapes(*given)
        raise NoRule("a shape is unknown")

    def rank(self) -> int:
        """Returns the number of axes of the first output. Raises NoRule if it is unknown."""
        shape = self.output_shapes()[0]
        if shape is None:
            raise NoRule("a shape is unknown")
        return len(shape)

    def constants(self) -> list[Values] | None:
        """Returns the outputs in both traces, computed now, if all inputs are small constants; else None.

        Numbers with a fraction are left to the rules: the rounding of a sum would be taken for a value.
        """
        if any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in self.operations[0].outputs):
            return None
        values = [pair for pair in self.known if pair is not None and max(map(np.size, pair)) <= MOST_VALUES]
        if len(values) < len(self.known) or not values or self.operations[0].op_def.is_stateful:
            return None
        computed = [
            _computed(operation, arguments)
            for operation, arguments in zip(self.operations, zip(*values, strict=True), strict=True)
        ]
        return [*zip(*computed, strict=True)] if None not in computed else None


def scaled_axes(shapes: Shapes) -> list[int]:
    """Returns the axes whose length differs between the traces. Raises NoRule if a shape is unknown."""
    first, second = shapes
    if first is None or second is None:
        raise NoRule("a shape is unknown")
    return [axis for axis, (size, other) in enumerate(zip(first, second, strict=True)) if size != other]


def shapes_with(shapes: Shapes, label: Label, rows: tuple[int, int]) -> Shapes:
    """Returns a tensor's shapes in both traces with the length of the axis of rows, which its label tells."""
    first, second = shapes
    if label.kind != ROWS or first is None or second is None or label.axis >= len(first):
        return shapes
    first, second = (
        (*shape[: label.axis], label.blocks * label.inner * count, *shape[label.axis + 1 :])
        if shape[label.axis] is None
        else shape
        for shape, count in zip((first, second), rows, strict=True)
    )
    return first, second


def bad(operation: Any, error: Exception) -> Label:
    """Returns the label of what an operation gives that mixes rows or has no rule."""
    return Label(MIXED if isinstance(error, Mixes) else UNKNOWN, operation=operation, why=str(error))


def sizes_of(shape: Any) -> Shape | None:
    """Returns the sizes of a tf.TensorShape; None if their number is unknown."""
    return None if shape.rank is None else tuple(shape.as_list())


def _computed(operation: Any, values: Sequence[Any]) -> list[Any] | None:
    """Returns the outputs of an operation for these inputs; None if it cannot be computed here."""
    function, remaining = getattr(tf.raw_ops, operation.type, None), list(values)
    if function is None or not all(tensor.dtype.is_numpy_compatible for tensor in operation.outputs):
        return None
    arguments: dict[str, Any] = {}
    parameters = [*inspect.signature(function).parameters]
    for parameter, argument in zip(parameters, operation.op_def.input_arg, strict=False):
        if argument.type_list_attr:
            return None
        name = argument.name if argument.name in parameters else parameter
        if argument.number_attr:
            count = operation.get_attr(argument.number_attr)
            arguments[name], remaining = remaining[:count], remaining[count:]
        else:
            arguments[name] = remaining.pop(0)
    names = {attribute.name for attribute in operation.op_def.attr} & {*parameters}
    try:
        results = function(**arguments, **{name: operation.get_attr(name) for name in names})
    except (tf.errors.OpError, TypeError, ValueError):
        return None
    several = isinstance(results, (list, tuple))
    return [np.asarray(result.numpy()) for result in (results if several else [results])]
