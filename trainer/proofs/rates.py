"""Measures what the devices exchange: all-reduces by size, copies from and to the host, and a step without work."""

import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer.cluster.strategy import Replicas
from trainer.training.steps import nodes_of

SIZES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 64 * 2**20)  # bytes of an all-reduce: a batch norm to a large model
_COPIED = 64 * 2**20  # bytes
_REPEATS = 5


@dataclass(frozen=True)
class AllReduce:
    """Holds what the sum of one float32 tensor over all devices takes."""

    bytes: int
    seconds: float
    bus_bytes_per_second: float  # 2 (N - 1) / N of the tensor cross each link of a ring


def all_reduces(replicas: Replicas, seconds: float, sizes: Sequence[int] = SIZES) -> tuple[list[AllReduce], str]:
    """Returns the time of all-reduces by size, and the operation that TensorFlow uses for them."""
    measured, kind, count = list[AllReduce](), "", replicas.count
    for size in sizes:

        def sum_over_devices(before: Any, size: int = size) -> Any:
            values = tf.fill((size // 4,), before * 0.0 + 1.0)
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)[0]

        loop = _loop(replicas, sum_over_devices)
        kind = kind or collective(loop)
        spent = _seconds_of(loop, seconds)
        measured.append(AllReduce(size, spent, 2 * (count - 1) / count * size / spent))
    return measured, kind


def empty_step(replicas: Replicas, seconds: float) -> float:
    """Returns the seconds of a step that adds one number on each device: what the loop itself costs."""
    return _seconds_of(_loop(replicas, lambda before: before * 0.0 + 1.0), seconds)


def copies(device: str) -> tuple[float, float]:
    """Returns the bytes per second of copies from the host to the device, and back; on a CPU, those of its memory."""
    with tf.device("CPU:0"):
        host = tf.ones(_COPIED // 4)

    def to_device() -> Any:
        with tf.device(device):
            copied = tf.identity(host)
            return copied, float(copied[-1])  # reading a number waits for the copy

    there, (on_device, _) = _fastest(to_device), to_device()
    back = _fastest(on_device.numpy)
    return _COPIED / there, _COPIED / back


def collective(loop: Any) -> str:
    """Returns what sums over devices in a traced loop, with its implementation, as `CollectiveReduceV2 (nccl)`."""
    nodes = nodes_of(loop.get_concrete_function(tf.constant(1)).graph)
    sums = [node for node in nodes if node.op.startswith(("CollectiveReduce", "CollectiveAllReduce", "NcclAllReduce"))]
    hints = {(node.op, node.attr["communication_hint"].s.decode()) for node in sums}
    return ", ".join(sorted(f"{name} ({hint})" if hint else name for name, hint in hints)) or "none"


def _loop(replicas: Replicas, step: Callable[[Any], Any]) -> Any:
    """Returns a function that runs `step` so many times on all devices, each time with a number from the last."""

    def run(times: Any) -> Any:
        total = tf.constant(0.0)
        for _ in tf.range(times):
            results = replicas.strategy.run(tf.autograph.experimental.do_not_convert(step), args=(total,))
            total = tf.add_n(list(replicas.strategy.experimental_local_results(results)))
        return total

    return tf.function(run, input_signature=[tf.TensorSpec((), tf.int32)])


def _seconds_of(loop: Any, seconds: float) -> float:
    """Returns the time of one pass, in calls that fill `seconds`."""
    float(loop(tf.constant(2)))  # traces, and starts the communication
    count, spent = 2, 0.0
    while True:
        began = time.monotonic()
        float(loop(tf.constant(count)))
        spent = time.monotonic() - began
        if spent >= seconds or count >= 2**20:
            return spent / count
        count *= 4


def _fastest(copy: Callable[[], Any]) -> float:
    return min(timeit.repeat(copy, number=1, repeat=_REPEATS))
