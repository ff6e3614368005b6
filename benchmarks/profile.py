"""Where the time of a step goes, by kind of operation, read from TensorFlow's own trace.

Each moment of a call is split among the operations that run in it; a moment without any belongs to TensorFlow's
dispatch, before the first and after the last one of a call to Python. Needs nothing but TensorFlow:
https://www.tensorflow.org/guide/profiler
"""

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

_CALL = "benchmark_call"
_DISPATCH, _PYTHON, _INPUT = "dispatch: no operation runs", "Python: before and after", "input: rows of a batch"
_GRADIENT = re.compile("gradient_tape|gradients/")
_SCOPES = {
    r"/(adam|rms_?sprop|sgd)[_\d]*/": "optimizer",
    "batch_normalization": "batch norm",
    "random|dropout": "random numbers, dropout",
}


def kind(type_: str, scope: str) -> str:
    """Of an operation by its type, as TensorFlow or oneDNN names it, and its name scope.

    What a custom gradient computes has no scope that says so: it counts as forward, but for gradients by a filter.
    """
    type_ = re.sub("^_Mkl(Native)?|^_|Fused|WithBias$", "", type_)
    depth = len(_GRADIENT.findall(scope))
    if re.search("Conv2[dD]", type_):
        if depth > 1:
            return "convolution, double backward"
        if type_.endswith("Filter"):
            return "convolution, backward by filter"
        return "convolution, backward by input" if depth else "convolution, forward"
    if "MatMul" in type_:
        return f"matrix product, {'backward' if depth else 'forward'}"
    if type_ == "Cast":
        return "casts"
    if type_.startswith(("Collective", "Nccl")):
        return "all-reduce"
    return next((name for part, name in _SCOPES.items() if re.search(part, f"/{scope}")), "activations, sums, the rest")


def seconds_by_kind(run: Callable[[], object]) -> dict[str, float]:
    """Calls `run` under the profiler; seconds of the call by kind of operation, which add up to the whole call."""
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        with tf.profiler.experimental.Trace(_CALL):
            run()
        tf.profiler.experimental.stop()
        [file] = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    return split(list(_events(space)))


Event = tuple[int, int, str]  # begin and end in picoseconds, kind


def _events(space: Any) -> Iterator[Event]:
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                found = re.fullmatch(r"([^:]+):(\w+)", name)
                if not found and name != _CALL:
                    continue
                begin = 1000 * line.timestamp_ns + event.offset_ps
                what = _CALL if not found else _INPUT if line.name.startswith("tf_data") else kind(found[2], found[1])
                yield begin, begin + event.duration_ps, what


def split(events: Iterable[Event]) -> dict[str, float]:
    """Seconds of the one benchmark_call among `events`, by kind."""
    [(begin, end, _)] = [event for event in events if event[2] == _CALL]
    inside = [(max(b, begin), min(e, end), what) for b, e, what in events if what != _CALL and b < end and e > begin]
    first, last = min(event[0] for event in inside), max(event[1] for event in inside)
    changes = [(b, what, 1) for b, _, what in inside] + [(e, what, -1) for _, e, what in inside]
    seconds, running = defaultdict[str, float](float), Counter[str]()
    seconds[_PYTHON] = (first - begin + end - last) / 1e12
    for (now, what, change), (after, *_) in pairwise([*sorted(changes), (last, "", 0)]):
        running[what] += change
        count = running.total()
        for each, number in (running if count else Counter({_DISPATCH: 1})).items():
            seconds[each] += (after - now) / 1e12 * number / (count or 1)
    return {each: value for each, value in seconds.items() if value}
