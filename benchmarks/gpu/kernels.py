"""Reads from TensorFlow's trace what a GPU does in some steps: how long it computes, and in which kernels."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer.invariance.compat import parse_profile

STEPS, SHOWN = 10, 8
_Event = tuple[int, int, str]  # picoseconds of its beginning and end, and the name


def kernels_of(run: Callable[[int], object]) -> dict[str, Any]:
    """Returns, of some steps, the share of the time in which the GPU computes, the kernels a step, and the longest."""
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=1, python_tracer_level=0, device_tracer_level=1
    )
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder, options)
        try:
            run(STEPS)
        finally:
            tf.profiler.experimental.stop()
        spaces = [parse_profile(file.read_bytes()) for file in Path(folder).rglob("*.xplane.pb")]
    return summary(sorted(_events(spaces)))


def _events(spaces: Iterable[Any]) -> Iterator[_Event]:
    """Yields kernels and copies on all streams of the GPUs."""
    for space in spaces:
        for plane in (plane for plane in space.planes if plane.name.startswith("/device:GPU")):
            names = {key: about.name for key, about in plane.event_metadata.items()}
            for line in (line for line in plane.lines if line.name.startswith("Stream")):
                for event in line.events:
                    began = line.timestamp_ns * 1000 + event.offset_ps
                    yield began, began + event.duration_ps, names[event.metadata_id]


def summary(events: list[_Event]) -> dict[str, Any]:
    """Returns what `kernels_of` does, of events in the order of their beginnings; {} for none."""
    if not events:
        return {}
    taken, busy, until = Counter[str](), 0, events[0][0]
    for began, ended, name in events:
        taken[name[:70]] += ended - began
        busy += max(0, ended - max(began, until))
        until = max(until, ended)
    longest = {name: round(time / taken.total(), 3) for name, time in taken.most_common(SHOWN)}
    between = until - events[0][0]
    return {"busy": busy / between, "step_ms": between / STEPS / 1e9, "kernels": len(events) / STEPS,
            "longest": longest}  # fmt: skip
