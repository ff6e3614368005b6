"""Measures images a second of the input alone, copied to the device and cast there; nothing is trained."""

import statistics
import time
from typing import Any

import tensorflow as tf

from benchmarks.gpu.execution import Results, rehearsing, turn
from benchmarks.trainer_loop import setup_of

REPEATS = 5


@turn(alone=True)
def main() -> None:
    """Keeps the median rate for photos of 224 x 224 x 3 in batches of 512, and the device."""
    results, size, rows = Results(), *((16, 8) if rehearsing() else (224, 512))
    networks = "benchmarks.gpu.networks"
    setup = setup_of(f"--model={networks}:resnet50", f"--data={networks}:photos", f"--size={max(size, 32)}",
                     f"--global_batch_size={rows}", "--replicas=1")  # fmt: skip
    iterator, device = setup.rows_from(0), setup.replicas.devices[0]

    def read(steps: Any) -> Any:
        total = tf.constant(0.0)
        for _ in tf.range(steps):
            images = next(iterator)[0]
            with tf.device(device):
                total += tf.reduce_max(tf.cast(images, tf.float32))
        return total

    function, steps = tf.function(read), 2 if rehearsing() else 20
    float(function(tf.constant(1)))
    rates = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        float(function(tf.constant(steps)))
        rates.append(steps * rows / (time.perf_counter() - began))
        results.keep(images_per_second=statistics.median(rates), device=device)


if __name__ == "__main__":
    main()
