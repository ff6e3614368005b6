"""Holds one operation as both traces have it, for the rules."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.invariance.internals import run_operation
from trainer.proof.labels import (
    BY_PLACE,
    INDEX,
    ROWS,
    SAME,
    SUM,
    UNIFORM,
    ZERO,
    Inherited,
    Label,
    Mixes,
    NoRule,
    Shape,
    Shapes,
    scaled_axes,
)

Values = tuple[Any, Any]  # of a tensor in both traces, as arrays
NOT_LINEAR = "is not linear in a sum over the rows of one replica, or in how many they are"
PAIRS = "pairs the rows of one replica with each other"
# Operations that keep places counted from the first row of a replica, or read them.
_INDEXING = ("Cast", "Identity", "GatherNd", "ScatterNd")
_COUNTING = (
    *("AddV2", "Mul", "Reshape", "ExpandDims", "StridedSlice", "Pack", "ConcatV2"),
    "UnsortedSegmentSum",
    *_INDEXING,
)
_MOST_VALUES = 4096  # of a tensor that is computed while labels are found


class Axes(NamedTuple):
    """Holds a letter for each axis of the output and of the inputs that may have rows.

    The inputs are those of these numbers.
    """

    inputs: dict[int, Sequence[Any]]
    output: Sequence[Any]


@dataclass(frozen=True)
class Node:
    """Holds an operation of both graphs, with what is known of its inputs.

    It notes which of them a rule reads.
    """

    operations: tuple[Any, Any]
    labels: list[Label]  # of the inputs
    known: list[Values | None]  # of the inputs: their values, where they are constants
    shapes: list[Shapes]  # of the inputs, in both traces
    rows: tuple[int, int]
    read: set[int] = field(default_factory=set)
    axes: list[Axes] = field(default_factory=list)  # of the rule
    # the values of outputs that are constants; empty if none is
    output_values: list[Values | None] = field(default_factory=list)

    @property
    def type(self) -> str:
        """Returns the operation's type, such as MatMul."""
        return self.operations[0].type

    @property
    def dtype(self) -> Any:
        """Returns the type of the first output."""
        return self.operations[0].outputs[0].dtype

    def attribute(self, name: str) -> Any:
        """Returns an attribute. Raises NoRule if the traces have different ones."""
        first, second = (operation.get_attr(name) for operation in self.operations)
        if first != second:
            raise NoRule(f"{name} follows from the number of rows")
        return first

    def shape(self, number: int) -> Shape:
        """Returns the shape of an input in the first trace.

        Raises NoRule if its number of axes is unknown.
        """
        if (shape := self.shapes[number][0]) is None:
            raise NoRule("a shape is unknown")
        return shape

    def rank(self, number: int) -> int:
        """Returns the number of axes of an input."""
        return len(self.shape(number))

    def value(self, number: int) -> Any:
        """Returns the value of an input that both traces share. Raises NoRule if there is none."""
        first, second = self.values(number)
        if not np.array_equal(first, second):
            raise NoRule("an axis or a place follows from the number of rows")
        return first

    def values(self, number: int) -> Values:
        """Returns the values of an input in both traces.

        Raises NoRule or Inherited if they are unknown.
        """
        values = self.known[number]
        if values is None:
            self.label(number)
            raise NoRule("an axis, a size or a place is computed while the step runs")
        self.read.add(number)
        return values

    def setting(self, *numbers: int) -> None:
        """Reads inputs of which only the values count, where they are constants."""
        self.read.update(number for number in numbers if self.known[number] is not None)

    def label(self, number: int) -> Label:
        """Returns an input's label. Raises Inherited if it is bad."""
        self.read.add(number)
        label = self.labels[number]
        if label.is_bad:
            raise Inherited(label)
        if label.places and self.type not in (_INDEXING if label.places == INDEX else _COUNTING):
            raise Mixes(BY_PLACE)
        return label

    def settled(self, number: int) -> Label:
        """Returns an input's label, and for zeros the one that follows from their shape.

        They are uniform if an axis is as long as there are rows, else the same.
        """
        label = self.label(number)
        if label.kind != ZERO:
            return label
        scaled = scaled_axes(self.shapes[number])
        if len(scaled) > 1:
            raise Mixes(PAIRS)
        return Label(UNIFORM, scaled[0]) if scaled else Label(SAME)

    def whole(self, number: int = 0) -> Label:
        """Returns an input's label: what is uniform as rows, zeros as what their shape says."""
        label = self.settled(number)
        if label.kind != UNIFORM:
            return label
        size = self.shape(number)[label.axis]
        if size is None or size % self.rows[0]:
            raise NoRule("a number of rows is unknown")
        return label._replace(kind=ROWS, blocks=size // self.rows[0])

    def refuse_unread(self) -> None:
        """Raises Inherited or Mixes if an input that no rule has read differs on replicas."""
        for number in {*range(len(self.labels))} - self.read:
            label = self.label(number)
            if label.kind == SUM or label.power:
                raise Mixes(NOT_LINEAR)
            if label.has_rows:
                raise Mixes("takes its settings from the rows of one replica")

    def output_shapes(self, number: int) -> Shapes:
        """Returns an output's shape in both traces.

        It also has what is known here and was not when the step was traced.
        """
        shapes = [sizes_of(operation.outputs[number].shape) for operation in self.operations]
        for trace, sizes in enumerate(shapes):
            if sizes is None or None not in sizes or number:
                continue
            if self.type in ("Reshape", "BroadcastTo", "Tile") and self.known[1]:
                targets = self.known[1][trace].tolist()
                if self.type == "Tile":
                    pairs = zip(self.shapes[0][trace] or (), targets, strict=True)
                    targets = [-1 if size is None else size * count for size, count in pairs]
                pairs = zip(sizes, targets, strict=True)
                shapes[trace] = tuple(size if target < 0 else target for size, target in pairs)
            elif self.axes:
                shapes[trace] = self._sizes_by_letters(sizes, trace)
        return shapes[0], shapes[1]

    def _sizes_by_letters(self, sizes: Shape, trace: int) -> Shape:
        """Returns these sizes of the output, the unknown ones by the inputs' equal letters."""
        lengths: dict[Any, Any] = {None: None}
        for number, letters in self.axes[-1].inputs.items():
            for letter, size in zip(letters, self.shapes[number][trace] or (), strict=False):
                if letter is not None and (size != 1 or letter not in lengths):
                    lengths[letter] = size
        letters = self.axes[-1].output
        if len(letters) != len(sizes):
            return sizes
        pairs = zip(letters, sizes, strict=True)
        return tuple(lengths.get(letter) if size is None else size for letter, size in pairs)

    def constants(self) -> list[Values] | None:
        """Returns the outputs in both traces, computed now, if all inputs are small constants.

        Otherwise it returns None. Numbers with a fraction are left to the rules, as the rounding of
        a sum would be taken for a value; so is what has a value for each row.
        """
        operation = self.operations[0]
        if operation.op_def.is_stateful or not self.known or None in self.known:
            return None
        exact = all(tensor.dtype.is_integer or tensor.dtype.is_bool for tensor in operation.outputs)
        if not exact or any(max(map(np.size, pair)) > _MOST_VALUES for pair in self.known if pair):
            return None
        arguments = zip(*filter(None, self.known), strict=True)
        pairs = zip(self.operations, arguments, strict=True)
        try:
            computed = [*zip(*(run_operation(*pair) for pair in pairs), strict=True)]
        except tf.errors.OpError:
            return None
        return computed if all(first.shape == second.shape for first, second in computed) else None


def shapes_with(shapes: Shapes, label: Label, rows: tuple[int, int]) -> Shapes:
    """Returns a tensor's shapes in both traces with the length of rows, which its label tells."""
    first, second = shapes
    if label.kind != ROWS or first is None or second is None or label.axis >= len(first):
        return shapes

    def completed(shape: Shape, count: int) -> Shape:
        if shape[label.axis] is not None:
            return shape
        length = label.blocks * label.inner * count
        return (*shape[: label.axis], length, *shape[label.axis + 1 :])

    return completed(first, rows[0]), completed(second, rows[1])


def sizes_of(shape: Any) -> Shape | None:
    """Returns the sizes of a tf.TensorShape; None if their number is unknown."""
    return None if shape.rank is None else tuple(shape.as_list())
