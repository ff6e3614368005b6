"""Measures what the devices exchange: all-reduces by size."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer.cluster.strategy import Replicas
from trainer.training.steps import nodes_of

SIZES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 64 * 2**20)  # bytes of an all-reduce: a batch norm to a large model


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
        loop = _loop(replicas, size // 4)
        kind = kind or collective(loop)
        spent = _seconds_of(loop, seconds)
        measured.append(AllReduce(size, spent, 2 * (count - 1) / count * size / spent))
    return measured, kind


def collective(loop: Any) -> str:
    """Returns what sums over devices in a traced loop, with its implementation, as `CollectiveReduceV2 (nccl)`."""
    nodes = nodes_of(loop.get_concrete_function(tf.constant(1)).graph)
    sums = [node for node in nodes if node.op.startswith(("CollectiveReduce", "CollectiveAllReduce", "NcclAllReduce"))]
    hints = {(node.op, node.attr["communication_hint"].s.decode()) for node in sums}
    return ", ".join(sorted(f"{name} ({hint})" if hint else name for name, hint in hints)) or "none"


def _loop(replicas: Replicas, count: int) -> Any:
    """Returns a function that sums (count,) float32 over all devices so many times, each time after the last."""

    def on_device(before: Any) -> Any:
        values = tf.fill((count,), before * 0.0 + 1.0)
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)[0]

    def run(times: Any) -> Any:
        total = tf.constant(0.0)
        for _ in tf.range(times):
            results = replicas.strategy.run(tf.autograph.experimental.do_not_convert(on_device), args=(total,))
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
