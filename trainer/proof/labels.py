"""Says what a tensor of one replica is to the step of one device that has all rows.

A step is traced twice, with b and with 2 b rows a replica of one global batch, so that n = N / b replicas share it. A
label with the power p holds for every such b, up to a factor of (b / N)^p, which is 1 for one device with all rows:

- SAME: every replica has what that device would have.
- ROWS: this replica's rows of it, along an axis of the size blocks * b * inner. Several batches one after another are
  blocks; inner neighbours belong to one row.
- UNIFORM: equal along an axis that is as long as there are rows, as of a mean's gradient.
- SUM: the replicas' values add up to it. What is SAME with the power p adds up with the power p - 1.
- ZERO: zeros, which are all of these.
- MIXED: an operation mixed rows in another way. UNKNOWN: there is no rule. Both hold that operation and why.
"""

from typing import Any, NamedTuple

import numpy as np

SAME, ROWS, UNIFORM, SUM, ZERO, MIXED, UNKNOWN = (
    "same",
    "rows",
    "uniform",
    "sum",
    "zero",
    "mixed",
    "unknown",
)
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

    @property
    def has_rows(self) -> bool:
        """Returns whether an axis is as long as there are rows."""
        return self.kind in (ROWS, UNIFORM)

    @property
    def is_bad(self) -> bool:
        """Returns whether nothing is known of the values."""
        return self.kind in (MIXED, UNKNOWN)

    def as_sum(self) -> "Label":
        """Returns the same label, that of a tensor which is SAME as that of a SUM."""
        return self._replace(kind=SUM, power=self.power - 1) if self.kind == SAME else self


class Mixes(Exception):
    """Reports that an operation mixes rows: the text says how."""


class NoRule(Exception):
    """Reports that the rules do not cover an operation: the text says which part of it."""


def power_between(first: Any, second: Any) -> int | None:
    """Returns p for which second = 2^p first in all places; None if there is none, or both are zero everywhere."""
    if first.dtype.kind not in "iuf" or not np.any(first):
        return None
    with np.errstate(all="ignore"):
        powers = np.unique(np.log2(np.divide(second, first, dtype=np.float64)[first != 0]))
    exact = len(powers) == 1 and float(powers[0]).is_integer() and np.array_equal(first == 0, second == 0)
    return int(powers[0]) if exact else None


def label_of_values(first: Any, second: Any, rows: tuple[int, int]) -> Label:
    """Returns the label of a tensor whose values in both traces, with so many rows, are known."""
    if first.dtype.kind == "V":  # bfloat16 is no kind of NumPy's own
        first, second = first.astype(np.float32), second.astype(np.float32)
    if first.shape == second.shape:
        if first.dtype.kind in "iufb" and not (np.any(first) or np.any(second)):
            return Label(ZERO)
        if np.array_equal(first, second):
            return Label(SAME)
        power = power_between(first, second)
        if power is None:
            return Label(UNKNOWN, why="a constant follows from the number of rows")
        return Label(SAME, power=power)
    axes = [axis for axis, sizes in enumerate(zip(first.shape, second.shape, strict=False)) if sizes[0] != sizes[1]]
    if first.ndim == second.ndim and len(axes) == 1 and first.size:
        (axis,) = axes
        # Whether each batch of one or several has one value for all of its rows: (…, batches, rows, …).
        blocks = first.shape[axis] // rows[0]
        sizes = zip((first, second), rows, strict=True)
        if blocks and all(values.shape[axis] == blocks * count for values, count in sizes):
            cut = [
                values.reshape(*values.shape[:axis], blocks, count, *values.shape[axis + 1 :])
                for values, count in zip((first, second), rows, strict=True)
            ]
            parts = [np.take(values, 0, axis + 1) for values in cut]
            if all(
                np.array_equal(values, np.broadcast_to(np.expand_dims(part, axis + 1), values.shape))
                for values, part in zip(cut, parts, strict=True)
            ):
                label = label_of_values(parts[0], parts[1], rows)
                alike = np.array_equal(parts[0], np.broadcast_to(np.take(parts[0], [0], axis), parts[0].shape))
                if label.kind == SAME:
                    return label._replace(kind=UNIFORM if alike else ROWS, axis=axis, blocks=1 if alike else blocks)
                return label
    return Label(MIXED, why="a constant has a value for each place in the batch")


def joined(first: Label, second: Label) -> Label:
    """Returns a label that holds for both, as for the results of two branches."""
    if first.is_bad or second.kind == ZERO:
        return first
    if second.is_bad or first.kind == ZERO:
        return second
    if first.kind == SUM or second.kind == SUM:
        first, second = first.as_sum(), second.as_sum()
    if first.kind == UNIFORM and second.kind == ROWS:
        first, second = second, first
    unlike = first._replace(of_metric=False) != second._replace(of_metric=False)
    covered = first.kind == ROWS and second.kind == UNIFORM
    if unlike and not (covered and (first.axis, first.power) == (second.axis, second.power)):
        return Label(UNKNOWN, why=f"is {first.kind} in one branch or turn of a loop and {second.kind} in another")
    return first._replace(of_metric=first.of_metric or second.of_metric)


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
            repeats = label.blocks * label.inner
            by_row = [size / count for size, count in zip(sizes, rows, strict=True)]
            if by_row[0] != by_row[1] or (label.kind == ROWS and by_row[0] != repeats):
                return False
        elif sizes[0] != sizes[1]:
            return False
    return True
