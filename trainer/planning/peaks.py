"""Predicts a step's peak of memory at any number of rows from its allocations at two. Imports no TensorFlow.

Each allocation is `fixed + per_row x rows` bytes; the larger trace gives the order. So is what is held at each moment,
and the peak is the largest of these lines: another moment may be the peak of a small batch than of a large one.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trainer.base.run_files.plan_file import Line, largest_rows, peak_of
from trainer.planning.allocator import Allocator, rounded

_TEMPORARY = "temp"  # the kind of what one kernel needs while it runs
_FLOAT32 = 1  # the number of the type in TensorFlow's protocol buffers
_AROUND = (0.99, 1.0, 1.01)


@dataclass(frozen=True)
class Allocation:
    """Holds one allocation: the operation, the kind of memory, the bytes asked for, and the number of their type."""

    operation: str
    kind: str
    bytes: int
    type: int

    @property
    def temporary(self) -> bool:
        """Returns whether it is a kernel's own: a GPU's kernels need other ones, or none."""
        return self.kind == _TEMPORARY


@dataclass(frozen=True)
class Trace:
    """Holds all allocations from the building of the model to the end of some steps with `rows` rows.

    `order` has an allocation's index where it begins and ~index where it ends; those of the steps that count begin at
    `order[step]`.
    """

    rows: int
    allocations: Sequence[Allocation]
    order: Sequence[int]
    step: int


class PeakMemory:
    """Predicts memory from traces of two numbers of rows, the first the smaller one."""

    def __init__(self, small: Trace, large: Trace, state: int) -> None:
        self._trace, self._state = large, state
        self._sizes = sizes(small, large)

    def device_lines(self, *, half: bool = False) -> list[Line]:
        """Returns the lines whose largest is what a GPU holds: the state, and a step's tensors without temporaries.

        `half`: 16 bits for what is float32 and depends on the rows, and a 16-bit copy of the weights: at most half of
        the state's bytes.
        """

        def size(index: int) -> Line:
            line, of = self._sizes[index], self._trace.allocations[index]
            return Line(line.fixed, line.per_row / 2) if half and of.type == _FLOAT32 else line

        return _lines(self._trace, size, self._state * (1.5 if half else 1.0), _lasting)

    def cpu_lines(self) -> list[Line]:
        """Returns the lines whose largest is what a CPU holds: the same with the kernels' temporaries."""
        return _lines(self._trace, self._sizes.__getitem__, self._state, _any)

    def limits(self, rows: int, *, temporaries: bool) -> tuple[int, int]:
        """Returns the least and the most memory, to 1 %, that a limited allocator may need for the step.

        Fragments make it more than what is held. They depend on single bytes: the sizes of rows around `rows` show it.
        """
        wanted = _any if temporaries else _lasting
        found = [self._limit(factor * rows, wanted) / factor for factor in _AROUND]
        return round(min(found)), round(max(found))

    def fits(self, rows: float, limit: int, *, temporaries: bool = True) -> bool:
        """Returns whether an allocator with `limit` bytes gives the step all that it asks for."""
        return self._peak(rows, limit, _any if temporaries else _lasting) is not None

    def fragments(self, limit: int) -> float:
        """Returns how many times as much memory a GPU with `limit` bytes needs as the largest step there holds."""
        lines = self.device_lines()
        fits, too_many = 1.0, float(largest_rows(lines, limit) + 1)
        if not self.fits(fits, limit, temporaries=False):
            return 1.0
        while too_many > 1.02 * fits:
            middle = math.sqrt(fits * too_many)
            if self.fits(middle, limit, temporaries=False):
                fits = middle
            else:
                too_many = middle
        return max(1.0, limit / peak_of(lines, fits))

    def _limit(self, rows: float, wanted: Callable[[Allocation], bool]) -> int:
        enough = too_little = self._peak(rows, None, wanted) or 1
        while self._peak(rows, enough, wanted) is None:
            too_little, enough = enough, round(enough * 1.2)
        while enough > 1.01 * too_little:
            middle = (enough + too_little) // 2
            if self._peak(rows, middle, wanted) is None:
                too_little = middle
            else:
                enough = middle
        return enough

    def _peak(self, rows: float, limit: int | None, wanted: Callable[[Allocation], bool]) -> int | None:
        """Returns the most bytes that TensorFlow's allocator gives away; None if `limit` bytes do not suffice."""
        allocator, allocations = Allocator(limit), self._trace.allocations
        begun: dict[int, int] = {}
        for index in self._trace.order:
            if not wanted(allocations[max(index, ~index)]):
                continue
            if index < 0:
                allocator.free(begun.pop(~index))
                continue
            address = allocator.allocate(max(1, round(self._sizes[index].at(rows))))
            if address is None:
                return None
            begun[index] = address
        return allocator.peak


def peak_bytes(trace: Trace, state: int, *, temporaries: bool) -> int:
    """Returns what the traced step holds at most, with the state."""
    wanted = _any if temporaries else _lasting
    lines = _lines(trace, lambda index: Line(float(rounded(trace.allocations[index].bytes)), 0.0), state, wanted)
    return round(max(line.fixed for line in lines))


def _any(allocation: Allocation) -> bool:
    return True


def _lasting(allocation: Allocation) -> bool:
    return not allocation.temporary


def _lines(trace: Trace, size: Callable[[int], Line], state: float, wanted: Callable[[Allocation], bool]) -> list[Line]:
    fixed, per_row, lines = state, 0.0, [Line(state, 0.0)]
    for index in trace.order[trace.step :]:
        if not wanted(trace.allocations[max(index, ~index)]):
            continue
        line, sign = size(max(index, ~index)), -1 if index < 0 else 1
        fixed, per_row = fixed + sign * line.fixed, per_row + sign * line.per_row
        lines.append(Line(fixed, per_row))
    return upper_envelope(lines)


def sizes(small: Trace, large: Trace) -> list[Line]:
    """Returns how the bytes of each allocation of the larger trace depend on the rows.

    An allocation is that of the same operation; where TensorFlow gave the work of equal operations to another of them,
    or names none, that of the same rank by size. One that the smaller trace lacks grows with the rows.
    """
    partners = _partners(small.allocations, large.allocations)
    found = []
    for index, allocation in enumerate(large.allocations):
        now, before = rounded(allocation.bytes), partners.get(index)
        more = large.rows if before is None else large.rows - small.rows
        per_row = (now - (0 if before is None else rounded(before))) / more
        found.append(Line(now - per_row * large.rows, per_row))
    return found


def _partners(small: Sequence[Allocation], large: Sequence[Allocation]) -> dict[int, int]:
    """Returns the bytes of the same allocation in `small` for those of `large`, by index."""
    found: dict[int, int] = {}
    left = set(range(len(small))), set(range(len(large)))
    for name in (_operation, _without_numbers):
        groups: tuple[dict[object, list[int]], ...] = (defaultdict(list), defaultdict(list))
        for group, indices, allocations in zip(groups, left, (small, large), strict=True):
            for index in sorted(indices):
                group[name(allocations[index])].append(index)
        for key, those in groups[1].items():
            these = groups[0].get(key, [])
            if len(these) != len(those) and name is _operation:
                continue
            if name is _without_numbers:
                these = sorted(these, key=lambda index: -small[index].bytes)
                those = sorted(those, key=lambda index: -large[index].bytes)
            for one, other in zip(these, those, strict=False):
                found[other] = small[one].bytes
                left[0].discard(one)
                left[1].discard(other)
    return found


def _operation(allocation: Allocation) -> object:
    return (allocation.operation, allocation.kind, allocation.type) if allocation.operation else id(allocation)


def _without_numbers(allocation: Allocation) -> object:
    return re.sub(r"_\d+", "", allocation.operation), allocation.kind, allocation.type


def upper_envelope(lines: Iterable[Line]) -> list[Line]:
    """Returns the lines that are the largest at some number of rows from 1 on, by rows."""
    found: list[Line] = []
    for line in sorted(set(lines), key=lambda each: (each.per_row, each.fixed)):
        if found and found[-1].per_row == line.per_row:
            found.pop()
        while len(found) > 1 and _crossing(found[-2], line) <= _crossing(found[-2], found[-1]):
            found.pop()
        if found and _crossing(found[-1], line) <= 1:
            found.pop()
        found.append(line)
    return found


def _crossing(lower: Line, upper: Line) -> float:
    """Returns the rows from which the steeper line is the larger."""
    return (lower.fixed - upper.fixed) / (upper.per_row - lower.per_row)
