"""Says what a tensor of one replica is to the step of one device that has all rows.

A step is traced twice, with b and with 2 b rows a replica of one global batch, so that n = N / b
replicas share it. A label with the power p holds for every such b, up to a factor of (b / N)^p,
which is 1 for one device with all rows:

- SAME: every replica has what that device would have.
- ROWS: this replica's rows of it, along an axis of the size blocks * b * inner. Several batches one
  after another are blocks; inner neighbours belong to one row. Places may be counted from the
  replica's first row on: their label says how many a row has.
- UNIFORM: equal along an axis that is as long as there are rows, as of a mean's gradient.
- SUM: the replicas' values add up to it. What is SAME with the power p adds up with the power p -
  1.
- ZERO: zeros, which are all of these.
- MIXED: an operation mixed rows in another way. UNKNOWN: there is no rule. Both hold that operation
  and why.
"""

from typing import Any, NamedTuple

import numpy as np

SAME = "same"
ROWS = "rows"
UNIFORM = "uniform"
SUM = "sum"
ZERO = "zero"
MIXED = "mixed"
UNKNOWN = "unknown"
INDEX = -1
BY_PLACE = "depends on the place in the batch"
Shape = tuple[Any, ...]  # sizes, None where one is unknown
Shapes = tuple[Shape | None, Shape | None]  # in the two traces


class Label(NamedTuple):
    """Holds what a tensor is; of a list of tensors, what each of them is."""

    kind: str
    axis: int = 0
    blocks: int = 1
    inner: int = 1
    power: int = 0
    operation: Any = None  # that mixed rows, or has no rule
    why: str = ""
    of_metric: bool = False  # whether it was computed from what a metric has counted so far
    # so many times the number of its row is added to each value; INDEX: the last axis begins with
    # the number of the row
    places: int = 0
    is_number: bool = False  # whether each value is the number of its row, and nothing else

    @property
    def has_rows(self) -> bool:
        """Returns whether an axis is as long as there are rows."""
        return self.kind in (ROWS, UNIFORM)

    @property
    def is_bad(self) -> bool:
        """Returns whether nothing is known of the values."""
        return self.kind in (MIXED, UNKNOWN)

    @property
    def is_same(self) -> bool:
        """Returns whether every replica has what one device would have."""
        return self.kind in (SAME, ZERO) and not self.power

    def as_sum(self) -> "Label":
        """Returns the same label, that of a tensor which is SAME as that of a SUM."""
        return self._replace(kind=SUM, power=self.power - 1) if self.kind == SAME else self


class Mixes(Exception):
    """Reports that an operation mixes rows: the text says how."""


class NoRule(Exception):
    """Reports that the rules do not cover an operation: the text says which part of it."""


class Inherited(Exception):
    """Reports that an input's label is bad, and holds that label."""

    def __init__(self, label: Label) -> None:
        super().__init__(label.why)
        self.label = label


def label_of_values(first: Any, second: Any, rows: tuple[int, int]) -> Label:
    """Returns the label of a tensor whose values in both traces, with so many rows, are known."""
    if first.dtype.kind == "V":  # bfloat16 is no kind of NumPy's own
        first = first.astype(np.float32)
        second = second.astype(np.float32)

    # Values of one shape may be equal, or differ by a power of the number of rows.
    both = first, second
    if first.shape == second.shape:
        if first.dtype.kind in "iufb" and not (np.any(first) or np.any(second)):
            return Label(ZERO)
        if np.array_equal(first, second):
            return Label(SAME)
        if first.dtype.kind in "iuf":
            with np.errstate(all="ignore"):
                powers = np.unique(np.log2(np.divide(second, first, dtype=np.float64)[first != 0]))
            zeros = np.array_equal(first == 0, second == 0)
            if zeros and len(powers) == 1 and float(powers[0]).is_integer():
                return Label(SAME, power=int(powers[0]))
        return Label(UNKNOWN, why="a constant follows from the number of rows")

    # One axis may follow from the rows, along which each batch has one value, or equal batches.
    sizes = [*zip(first.shape, second.shape, strict=False)]
    axes = [axis for axis, (size, other) in enumerate(sizes) if size != other]
    if first.ndim == second.ndim and len(axes) == 1 and first.size:
        (axis,) = axes
        counts = [size / count for size, count in zip(sizes[axis], rows, strict=True)]
        if counts[0] == counts[1] == int(counts[0]):
            batches = []
            for values, count in zip(both, rows, strict=True):
                shape = (*values.shape[:axis], -1, count, *values.shape[axis + 1 :])
                batches.append(values.reshape(shape))
            if all(np.all(batch == np.take(batch, [0], axis + 1)) for batch in batches):
                first, second = (np.take(batch, 0, axis + 1) for batch in batches)
                label = label_of_values(first, second, rows)
                if label.kind != SAME:
                    return label
                alike = np.all(first == np.take(first, [0], axis))
                if alike:
                    return label._replace(kind=UNIFORM, axis=axis, blocks=1)
                return label._replace(kind=ROWS, axis=axis, blocks=int(counts[0]))
    return Label(MIXED, why=BY_PLACE)


def joined(first: Label, second: Label) -> Label:
    """Returns a label that holds for both, as for the results of two branches."""
    if first.is_bad or second.kind == ZERO:
        return first
    if second.is_bad or first.kind == ZERO:
        return second
    if SUM in (first.kind, second.kind):
        first = first.as_sum()
        second = second.as_sum()
    if first.kind == UNIFORM:
        first, second = second, first
    of_metric = first.of_metric or second.of_metric
    first = first._replace(of_metric=of_metric)
    second = second._replace(of_metric=of_metric)
    if second.kind == UNIFORM and first.kind == ROWS:
        second = second._replace(kind=ROWS, blocks=first.blocks, inner=first.inner)
    if first != second:
        why = f"is {first.kind} in one branch or turn of a loop and {second.kind} in another"
        return Label(UNKNOWN, why=why)
    return first


def fits(label: Label, shapes: Shapes, rows: tuple[int, int]) -> bool:
    """Returns whether the shapes in both traces can be those of a tensor with this label."""
    first, second = shapes
    if first is None or second is None:
        return not label.has_rows
    if len(first) != len(second) or (label.has_rows and label.axis >= len(first)):
        return False
    for axis, sizes in enumerate(zip(first, second, strict=True)):
        if None in sizes:
            continue
        if label.has_rows and axis == label.axis:
            by_row = [size / count for size, count in zip(sizes, rows, strict=True)]
            if by_row[0] != by_row[1]:
                return False
            if label.kind == ROWS and by_row[0] != label.blocks * label.inner:
                return False
        elif sizes[0] != sizes[1]:
            return False
    return True


def scaled_axes(shapes: Shapes) -> list[int]:
    """Returns the axes whose length differs between the traces.

    Raises NoRule if a shape is unknown.
    """
    first, second = shapes
    if first is None or second is None:
        raise NoRule("a shape is unknown")
    pairs = zip(first, second, strict=True)
    return [axis for axis, (size, other) in enumerate(pairs) if size != other]
