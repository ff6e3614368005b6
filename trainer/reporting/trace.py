"""Reads the profile of some steps that TensorFlow wrote, and divides their time by what the devices did.

The only module that knows the names in such a profile: those of threads, of operations and of a GPU's kernels. They
are the same in TensorFlow 2.17 and 2.21. On a CPU an operation is an event of a thread; on a GPU a kernel of a stream.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.base.run_files.breakdown import ALL_REDUCE, CALL, INPUT, MATRIX, MEMORY, TIME_SHARES, Span, divide
from trainer.invariance.compat import parse_profile

PROFILES = "plugins/profile/*/*.xplane.pb"  # where TensorBoard looks for them, below its folder of logs
EVENT_OF_A_CALL = "train"  # that the loop records around each call

_TINY_PS = 10_000_000  # an operation of a CPU below 10 µs costs about what it takes to call it
_OPERATION = re.compile(r"[\w./-]+:(_?[A-Z]\w*)")  # while/body/_1/while/dense/MatMul:MatMul
# They only call others, which have events of their own.
_CALLERS = re.compile(r"(Stateful|Stateless)?(PartitionedCall|While|If|Case)|(while|call|conditional)[.\d]*")
_EVENTS = {EVENT_OF_A_CALL: CALL, "IteratorGetNextOp::DoCompute": INPUT}
_ALL_REDUCE = re.compile(r"collective|nccl|all-reduce", re.IGNORECASE)
_MATRIX = re.compile(
    r"matmul|conv(?!ert)|gemm|gemv|einsum|cutlass|xmma|wgrad|dgrad|fprop|winograd|rnn|lstm|attention|fmha"
    r"|(?<![a-z])dot(?![a-z])",
    re.IGNORECASE,
)


def shares_of(profile: Path, *, compiled: bool = False) -> dict[str, float]:
    """Returns the share of each kind of `trainer.base.run_files.breakdown`, the mean over the GPUs.

    compiled: XLA compiled the steps or their gradients. Raises ValueError if the profile has no steps, or if they were
    compiled for CPUs, and `trainer.invariance.compat.Missing` if this TensorFlow cannot read its profiles.
    """
    space = parse_profile(profile.read_bytes())
    host = [span for plane in space.planes if plane.name.startswith("/host:CPU") for span in _of_host(plane)]
    around = [span for span in host if span[2] in (CALL, INPUT)]
    gpus = [list(_of_gpu(plane)) for plane in space.planes if plane.name.startswith("/device:GPU")]
    if compiled and not any(gpus):
        raise ValueError("TensorFlow names too little of what XLA computes on CPUs: use --jit_compile=false")
    divided = [divide([*around, *kernels]) for kernels in gpus if kernels] or [divide(host)]
    if not divided[0]:
        raise ValueError("it has no steps")
    return {kind: sum(shares[kind] for shares in divided) / len(divided) for kind in TIME_SHARES}


def _of_host(plane: Any) -> Iterator[Span]:
    """Yields _EVENTS, and TensorFlow's operations in all threads but those that make batches."""
    for line in plane.lines:
        makes_batches = line.name.startswith("tf_data")
        for name, _, start, end in _events(plane, line):
            operation = _OPERATION.fullmatch(name)
            if name in _EVENTS:
                yield start, end, _EVENTS[name]
            elif operation and not makes_batches and not _CALLERS.fullmatch(operation[1]):
                kind = _kind(operation[1])
                if kind == ALL_REDUCE or end - start >= _TINY_PS:
                    yield start, end, kind


def _of_gpu(plane: Any) -> Iterator[Span]:
    """Yields the kernels and copies of a GPU. TensorFlow names the operation that started one, where it knows it."""
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for name, texts, start, end in _events(plane, line):
                operation = _OPERATION.fullmatch(texts.get("tf_op", ""))
                by_operation = _kind(operation[1]) if operation else MEMORY
                yield start, end, by_operation if by_operation != MEMORY else _kind(name)


def _kind(name: str) -> str:
    """Returns what an operation or a kernel of this name does."""
    if _ALL_REDUCE.search(name):
        return ALL_REDUCE
    return MATRIX if _MATRIX.search(name) else MEMORY


def _events(plane: Any, line: Any) -> Iterator[tuple[str, dict[str, str], int, int]]:
    """Yields name, texts about it, start and end in picoseconds."""
    names = {number: metadata.name for number, metadata in plane.stat_metadata.items()}
    for event in line.events:
        start = 1000 * line.timestamp_ns + event.offset_ps
        texts = {names[stat.metadata_id]: stat.str_value or names.get(stat.ref_value, "") for stat in event.stats}
        yield plane.event_metadata[event.metadata_id].name, texts, start, start + event.duration_ps
