"""Predicts a step's peak memory at any number of rows from traces of its allocations at two numbers
of rows.

Each allocation has `fixed + per_row x rows` bytes, and the larger trace gives the order of
allocations. So the memory held at each moment is such a line, too, and the peak is the largest of
these lines. Which one that is may depend on the number of rows.
"""

import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from trainer.base.errors import PlatformFault
from trainer.base.run_files.plan_file import LinearInRows
from trainer.invariance.internals import parse_profile

_TEMPORARY = "temp"  # TensorFlow's name for memory that one kernel needs while it runs
_FLOAT32 = 1  # DataType.DT_FLOAT in TensorFlow's protocol buffers
_UNIT = 256  # bytes: TensorFlow's allocator rounds sizes up to a multiple
# The order of independent operations differs from process to process. Tensors of the skip
# connections of a U-Net may then live longer: the same step held 179.5 or 213.8 MB. `worst_order`
# therefore frees each tensor later, by this share of a step's events, which is more than was
# measured (benchmarks/plan_memory.py).
_LATE_SHARE = 0.04
# where peaks are computed, 1 to 3e8; between two of them the error is 0.1 % at most
_ROWS = 1.05 ** np.arange(400)


@dataclass(frozen=True)
class Allocation:
    """Holds an allocation: operation, kind of memory, rounded bytes, number of its DataType."""

    operation: str
    kind: str
    bytes: int
    type: int


@dataclass(frozen=True)
class Trace:
    """Holds all allocations from building the model to the end of some steps with `rows` rows.

    `order` has an allocation's index where it is made and ~index, which is negative, where it is
    freed. The steps that count start at `order[step]`, after those that warm up.
    """

    rows: int
    allocations: Sequence[Allocation]
    order: Sequence[int]
    step: int

    def changes(self, *, temporaries: bool) -> Iterator[tuple[int, int]]:
        """Yields an allocation's index with 1 where it is made and -1 where it is freed.

        temporaries: whether also workspace of CPU kernels; the kernel of a GPU needs another
            amount, or none.
        """
        for entry in self.order[self.step :]:
            index = max(entry, ~entry)
            if temporaries or self.allocations[index].kind != _TEMPORARY:
                yield index, 1 if entry >= 0 else -1


def peak_lines(
    trace: Trace,
    sizes: Sequence[LinearInRows],
    state: float,
    *,
    temporaries: bool = False,
    half: bool = False,
) -> list[LinearInRows]:
    """Returns the linear pieces of peak memory over the rows: the lines that are the largest at one
    of _ROWS.

    They are of `state`, the bytes of all variables, and the tensors of a step, whose `sizes` by
    rows are those of `sizes_by_rows`. On a CPU, kernels' temporaries add to them. half: whether
    float32 tensors that depend on the rows have 16 bits; a 16-bit copy of the weights then adds at
    most half of the state's bytes.
    """
    fixed = state * (1.5 if half else 1.0)
    per_row = 0.0
    lines = [LinearInRows(fixed, per_row)]
    for index, sign in trace.changes(temporaries=temporaries):
        halved = half and trace.allocations[index].type == _FLOAT32
        fixed += sign * sizes[index].fixed
        per_row += sign * sizes[index].per_row * (0.5 if halved else 1.0)
        lines.append(LinearInRows(fixed, per_row))
    held = np.array(lines)
    return [lines[place] for place in np.unique((held[:, :1] + held[:, 1:] * _ROWS).argmax(axis=0))]


def peak_bytes(trace: Trace, state: int, *, temporaries: bool) -> int:
    """Returns the peak memory of the traced steps in bytes, with the state."""
    sizes = [LinearInRows(float(allocation.bytes), 0.0) for allocation in trace.allocations]
    return round(
        max(line.fixed for line in peak_lines(trace, sizes, state, temporaries=temporaries))
    )


def worst_order(trace: Trace, state: int, steps: int) -> float:
    """Returns the factor by which another order of the operations may raise the peak."""
    changes = trace.changes(temporaries=False)
    sizes = np.array([sign * trace.allocations[index].bytes for index, sign in changes])
    late = max(1, int(_LATE_SHARE * len(sizes) / steps))
    made = np.cumsum(np.maximum(sizes, 0))
    freed = np.cumsum(np.minimum(sizes, 0))
    # each tensor is freed so many events later
    held = made + np.concatenate([np.zeros(late), freed[:-late]])
    return float(state + held.max()) / peak_bytes(trace, state, temporaries=False)


def sizes_by_rows(small: Trace, large: Trace) -> list[LinearInRows]:
    """Returns how the bytes of each allocation of the larger trace depend on the rows.

    Each is compared with the same allocation in the smaller trace: one of the same operation. If
    there are not equally many of them, or if they have no name, it is the one of the same rank by
    size among operations whose names differ in numbers only. One without a partner counts as
    proportional to the rows.
    """
    partners = {}  # by index in the larger trace, the bytes in the smaller one
    left = set(range(len(small.allocations))), set(range(len(large.allocations)))
    # first by the whole name of the operation, then without its numbers
    for exact in (True, False):
        groups: tuple[dict[object, list[int]], ...] = (defaultdict(list), defaultdict(list))
        for group, indices, trace in zip(groups, left, (small, large), strict=True):
            for index in sorted(indices):
                of_index = trace.allocations[index]
                name = of_index.operation if exact else re.sub(r"_\d+", "", of_index.operation)
                group[
                    (name, of_index.kind, of_index.type) if name or not exact else id(of_index)
                ].append(index)
        for key, larger in groups[1].items():
            smaller = groups[0].get(key, [])
            if not exact:
                smaller = sorted(smaller, key=lambda index: -small.allocations[index].bytes)
                larger = sorted(larger, key=lambda index: -large.allocations[index].bytes)
            elif len(smaller) != len(larger):
                continue
            for few, many in zip(smaller, larger, strict=False):
                partners[many] = small.allocations[few].bytes
                left[0].discard(few)
                left[1].discard(many)
    lines = []
    for index, allocation in enumerate(large.allocations):
        more_rows = large.rows - (small.rows if index in partners else 0)
        per_row = (allocation.bytes - partners.get(index, 0)) / more_rows
        lines.append(LinearInRows(allocation.bytes - per_row * large.rows, per_row))
    return lines


_HOST_TRACER_LEVEL = 2  # the lowest at which the profiler records allocations
_STEPS = "planned steps"  # the name of an event that marks the steps in the trace
# steps that run before those that count; steps that count
_WARM_UP = 2
COUNTED = 4
_FREED = "MemoryDeallocation"
_NAMES = ("MemoryAllocation", _FREED, _STEPS)
Step = TypeVar("Step", bound=Callable[[], object])


def traced(rows: int, build: Callable[[], Step]) -> tuple[Step, Trace]:
    """Runs `build`, then the step that it returns; returns this and a trace of allocations.

    The trace marks the last COUNTED steps. TensorFlow on the CPU must use the allocator of GPUs, as
    trainer.plan sets. Raises PlatformFault if the trace has no allocation.
    """
    options = tf.profiler.experimental.ProfilerOptions(
        _HOST_TRACER_LEVEL, python_tracer_level=0, device_tracer_level=0
    )
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
    # The address pairs an allocation with its end. What was allocated before the trace began is
    # left out.
    allocations: list[Allocation] = []
    order: list[int] = []
    live = {}
    first = 0
    for _, name, values in sorted(_events(spaces), key=lambda event: event[0]):
        address = values.get("addr")
        if name == _STEPS:
            first = len(order)
        elif name != _FREED:
            live[address] = len(allocations)
            order.append(len(allocations))
            size = max(1, math.ceil(int(values["requested_bytes"]) / _UNIT)) * _UNIT
            allocations.append(
                Allocation(
                    str(values.get("tf_op", "")),
                    str(values.get("region_type", "")),
                    size,
                    int(values.get("data_type", 0)),
                )
            )
        elif address in live:
            order.append(~live.pop(address))
    if not first:
        raise PlatformFault("TensorFlow traced no allocation: its memory cannot be counted")
    return step, Trace(rows, allocations, order, first)


def _events(spaces: Iterable[Any]) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yields time, name and values of each event of _NAMES: allocations, their ends, steps."""
    for plane in (plane for space in spaces for plane in space.planes):
        names = {
            key: about.name for key, about in plane.event_metadata.items() if about.name in _NAMES
        }
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
