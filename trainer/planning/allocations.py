"""Reads from TensorFlow's own trace which memory is allocated and freed, in its order."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer.base.errors import PlatformFault
from trainer.invariance.compat import parse_profile
from trainer.planning.peak_memory import Allocation, Trace

_LEVEL = 2  # of the trace: the first that has allocations
_STEPS = "planned steps"
_WARM_UP, COUNTED = 2, 4
_FREED = "MemoryDeallocation"
_NAMES = ("MemoryAllocation", _FREED, _STEPS)
_Timed = tuple[int, str, Mapping[str, Any]]


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
    trace = _trace(rows, sorted(_events(spaces), key=lambda event: event[0]))
    if not trace.step:
        raise PlatformFault("TensorFlow traced no allocation: its memory cannot be counted")
    return trace


def _events(spaces: Iterable[Any]) -> Iterator[_Timed]:
    """Yields time, kind and values of each allocation, of the end of each, and of the beginning of the steps."""
    for space in spaces:
        for plane in space.planes:
            names = {key: about.name for key, about in plane.event_metadata.items() if about.name in _NAMES}
            stats = {key: about.name for key, about in plane.stat_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    if name := names.get(event.metadata_id):
                        yield line.timestamp_ns * 1000 + event.offset_ps, name, _values(event, stats)


def _values(event: Any, stats: Mapping[int, str]) -> dict[str, Any]:
    values = {}
    for stat in event.stats:
        kind = stat.WhichOneof("value")
        value = getattr(stat, kind)
        values[stats[stat.metadata_id]] = stats[value] if kind == "ref_value" else value
    return values


def _trace(rows: int, events: Iterable[_Timed]) -> Trace:
    """Pairs the ends with their allocations by address; what was allocated before the trace is left out."""
    allocations: list[Allocation] = []
    order: list[int] = []
    live: dict[Any, int] = {}
    step = 0
    for _, name, values in events:
        address = values.get("addr")
        if name == _STEPS:
            step = len(order)
        elif name == _FREED:
            if address in live:
                order.append(~live.pop(address))
        else:
            live[address] = len(allocations)
            order.append(len(allocations))
            allocations.append(
                Allocation(str(values.get("tf_op", "")), str(values.get("region_type", "")),
                           int(values["requested_bytes"]), int(values.get("data_type", 0)))
            )  # fmt: skip
    return Trace(rows, allocations, order, step)
