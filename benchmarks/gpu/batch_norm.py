"""Measures batch norm over replicas beside TensorFlow's fused kernel: `python -m benchmarks.gpu.batch_norm`.

One device computes what each of two replicas does: the all-reduce gives back what it gets.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import keras
import tensorflow as tf

from benchmarks.gpu.execution import Results, rehearsing, turn
from trainer.invariance.batch_norm import normalize_in_place

SHAPES = ((64, 112, 112, 64), (64, 56, 56, 256), (64, 28, 28, 512), (64, 14, 14, 1024))  # in ResNet-50
REPEATS, STEPS = 5, 20


class OneOfTwo:
    """Stands for the context of a replica among two, whose all-reduce is the identity."""

    num_replicas_in_sync = 2
    replica_id_in_sync_group = 0

    def all_reduce(self, operation: Any, values: Any, options: Any = None) -> Any:
        """Returns `values`."""
        return values


@turn(alone=True)
def main() -> None:
    """Keeps microseconds of a layer's pass and its gradient by shape, both ways in turn."""
    results, lines = Results(), []
    for shape in SHAPES:
        size = (2, 4, 4, 8) if rehearsing() else shape
        ways = {"fused": _pass(size, over_replicas=False), "over_replicas": _pass(size, over_replicas=True)}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(REPEATS):
            for name, run in ways.items():
                began = time.perf_counter()
                float(run(tf.constant(STEPS)))
                taken[name].append((time.perf_counter() - began) / STEPS)
        medians = {name: 1e6 * statistics.median(values) for name, values in taken.items()}
        lines.append({"shape": size, **medians, "ratio": medians["over_replicas"] / medians["fused"]})
        results.keep(microseconds=lines)


def _pass(shape: tuple[int, ...], *, over_replicas: bool) -> Callable[[Any], Any]:
    """Returns a traced function that runs a layer forwards and backwards so many times."""
    layer = keras.layers.BatchNormalization()
    layer.build(shape)
    normalize_in_place(layer, synchronized=over_replicas)
    inputs = tf.random.normal(shape)

    def run(times: Any) -> Any:
        total = tf.constant(0.0)
        for _ in tf.range(times):
            with tf.GradientTape() as tape:
                shifted = inputs + total
                tape.watch(shifted)
                loss = tf.reduce_sum(layer(shifted, training=True) * inputs)
            total = 1e-9 * tf.reduce_mean(tape.gradient(loss, shifted))
        return total

    function = tf.function(run, input_signature=[tf.TensorSpec((), tf.int32)])
    if over_replicas:
        with patch.object(tf.distribute, "get_replica_context", OneOfTwo):
            function(tf.constant(1))
    function(tf.constant(1))
    return function


if __name__ == "__main__":
    main()
