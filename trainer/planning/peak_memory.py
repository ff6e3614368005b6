"""Predicts a step's peak of memory at any number of rows from its allocations at two, by TensorFlow's own trace.

Each allocation is `fixed + per_row x rows` bytes; the larger trace gives the order. So is what is held at each moment,
and the peak is the largest of these lines: another moment may be the peak of a small batch than of a large one.
"""

import re
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.base.errors import PlatformFault
from trainer.base.run_files.plan_file import LinearInRows
from trainer.invariance.internals import parse_profile

_TEMPORARY = "temp"  # the kind of what one kernel needs while it runs
_FLOAT32 = 1  # the number of the type in TensorFlow's protocol buffers
_ROUNDED = 256  # bytes, of which TensorFlow's allocator gives multiples
# Operations that do not wait for one another run in an order that differs from process to process: across the skip
# connections of a U-Net tensors then live longer, and a step held 179.5 or 213.8 MB. So each tensor is also taken to be
# freed later, by this part of a step's events, which is more than was seen (benchmarks/plan_memory.py).
_LATE = 0.04
_ROWS = 1.05 ** np.arange(400)  # at which a peak is looked for, 1 to 3e8: a peak between two is off by 0.1 % at most


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

    def device_lines(self, *, half: bool = False) -> list[LinearInRows]:
        """Returns the lines whose largest is what a GPU holds: the state, and a step's tensors without temporaries.

        `half`: 16 bits for what is float32 and depends on the rows, and a 16-bit copy of the weights: at most half of
        the state's bytes.
        """

        def size(index: int) -> LinearInRows:
            line, of = self._sizes[index], self._trace.allocations[index]
            return LinearInRows(line.fixed, line.per_row / 2) if half and of.type == _FLOAT32 else line

        return _lines(self._trace, size, self._state * (1.5 if half else 1.0), temporaries=False)

    def cpu_lines(self) -> list[LinearInRows]:
        """Returns the lines whose largest is what a CPU holds: the same with the kernels' temporaries."""
        return _lines(self._trace, self._sizes.__getitem__, self._state, temporaries=True)


def peak_bytes(trace: Trace, state: int, *, temporaries: bool) -> int:
    """Returns what the traced step holds at most, with the state."""
    lines = _lines(
        trace, lambda index: LinearInRows(float(rounded(trace.allocations[index].bytes)), 0.0), state, temporaries
    )
    return round(max(line.fixed for line in lines))


def worst_order(trace: Trace, state: int, steps: int) -> float:
    """Returns how many times as much a step may hold, in another order of its operations, as in the traced one."""
    order = list(_chosen(trace, trace.step, temporaries=False))
    late, held, most = int(_LATE * len(order) / steps), state, state
    waiting: deque[tuple[int, int]] = deque()  # where a tensor's memory is free at the latest, and its bytes
    for place, index in enumerate(order):
        while waiting and waiting[0][0] <= place:
            held -= waiting.popleft()[1]
        size = rounded(trace.allocations[max(index, ~index)].bytes)
        if index < 0:
            waiting.append((place + late, size))
        else:
            held += size
            most = max(most, held)
    return most / peak_bytes(trace, state, temporaries=False)


def rounded(size: int) -> int:
    """Returns the bytes that an allocation of `size` takes at least."""
    return max(1, -(-size // _ROUNDED)) * _ROUNDED


def _chosen(trace: Trace, begin: int, temporaries: bool) -> Iterator[int]:
    """Yields the trace's order from `begin` on, without the kernels' own memory unless `temporaries`."""
    for index in trace.order[begin:]:
        if temporaries or not trace.allocations[max(index, ~index)].temporary:
            yield index


def _lines(trace: Trace, size: Callable[[int], LinearInRows], state: float, temporaries: bool) -> list[LinearInRows]:
    """Returns what is held at each moment that is the peak at one of _ROWS."""
    fixed, per_row, lines = state, 0.0, [LinearInRows(state, 0.0)]
    for index in _chosen(trace, trace.step, temporaries):
        line, sign = size(max(index, ~index)), -1 if index < 0 else 1
        fixed, per_row = fixed + sign * line.fixed, per_row + sign * line.per_row
        lines.append(LinearInRows(fixed, per_row))
    held = np.array(lines)
    return [lines[place] for place in np.unique((held[:, :1] + held[:, 1:] * _ROWS).argmax(axis=0))]


def sizes(small: Trace, large: Trace) -> list[LinearInRows]:
    """Returns how the bytes of each allocation of the larger trace depend on the rows.

    An allocation is that of the same operation; where TensorFlow gave the work of equal operations to another of them,
    or names none, that of the same rank by size. One that the smaller trace lacks grows with the rows.
    """
    partners, lines = _partners(small.allocations, large.allocations), []
    for index, allocation in enumerate(large.allocations):
        now, before = rounded(allocation.bytes), partners.get(index)
        rows = large.rows - (0 if before is None else small.rows)
        per_row = (now - (0 if before is None else rounded(before))) / rows
        lines.append(LinearInRows(now - per_row * large.rows, per_row))
    return lines


def _partners(small: Sequence[Allocation], large: Sequence[Allocation]) -> dict[int, int]:
    """Returns the bytes of the same allocation in `small` for those of `large`, by index."""
    partners: dict[int, int] = {}
    left = set(range(len(small))), set(range(len(large)))
    for exact in (True, False):  # first by the whole name of the operation, then without its numbers
        groups: tuple[dict[object, list[int]], ...] = (defaultdict(list), defaultdict(list))
        for group, indices, allocations in zip(groups, left, (small, large), strict=True):
            for index in sorted(indices):
                of = allocations[index]
                name = of.operation if exact else re.sub(r"_\d+", "", of.operation)
                group[(name, of.kind, of.type) if name or not exact else id(of)].append(index)
        for key, larger in groups[1].items():
            smaller = groups[0].get(key, [])
            if not exact:
                smaller = sorted(smaller, key=lambda index: -small[index].bytes)
                larger = sorted(larger, key=lambda index: -large[index].bytes)
            elif len(smaller) != len(larger):
                continue
            for few, many in zip(smaller, larger, strict=False):
                partners[many] = small[few].bytes
                left[0].discard(few)
                left[1].discard(many)
    return partners


_LEVEL = 2  # of the trace: the first that has allocations
_STEPS = "planned steps"
_WARM_UP, COUNTED = 2, 4
_FREED = "MemoryDeallocation"
_NAMES = ("MemoryAllocation", _FREED, _STEPS)


def traced(rows: int, build: Callable[[], Callable[[], object]]) -> Trace:
    """Runs `build` and then some times the step that it returns; returns all that they allocate.

    TensorFlow's CPU must use the allocator of GPUs (trainer.plan). The last COUNTED steps are marked.
    """
    options = tf.profiler.experimental.ProfilerOptions(_LEVEL, python_tracer_level=0, device_tracer_level=0)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder, options)
        try:
            step = build()
            for _ in range(_WARM_UP):
                step()
            with tf.profiler.experimental.Trace(_STEPS):
                for _ in range(COUNTED):
                    step()
        finally:
            tf.profiler.experimental.stop()
        spaces = [parse_profile(file.read_bytes()) for file in Path(folder).rglob("*.xplane.pb")]
    # Pairs the ends of allocations with their beginnings by address; what was allocated before the trace is left out.
    allocations: list[Allocation] = []
    order: list[int] = []
    live: dict[Any, int] = {}
    first = 0
    for _, name, values in sorted(_events(spaces), key=lambda event: event[0]):
        address = values.get("addr")
        if name == _STEPS:
            first = len(order)
        elif name != _FREED:
            live[address] = len(allocations)
            order.append(len(allocations))
            allocations.append(
                Allocation(str(values.get("tf_op", "")), str(values.get("region_type", "")),
                           int(values["requested_bytes"]), int(values.get("data_type", 0)))
            )  # fmt: skip
        elif address in live:
            order.append(~live.pop(address))
    if not first:
        raise PlatformFault("TensorFlow traced no allocation: its memory cannot be counted")
    return Trace(rows, allocations, order, first)


def _events(spaces: Iterable[Any]) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yields time, kind and values of each allocation, of the end of each, and of the beginning of the steps."""
    for plane in (plane for space in spaces for plane in space.planes):
        names = {key: about.name for key, about in plane.event_metadata.items() if about.name in _NAMES}
        stats = {key: about.name for key, about in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                if event.metadata_id not in names:
                    continue
                values = {}
                for stat in event.stats:
                    kind = stat.WhichOneof("value")
                    value = getattr(stat, kind)
                    values[stats[stat.metadata_id]] = stats[value] if kind == "ref_value" else value
                yield line.timestamp_ns * 1000 + event.offset_ps, names[event.metadata_id], values
