"""Measures what plans assume of a GPU: starting an operation, an all-reduce, CUDA's context, NCCL's buffers."""

import time
from typing import Any

import tensorflow as tf

from benchmarks.gpu.execution import Results, rehearsing, turn
from benchmarks.gpu.nvidia import used_gib
from trainer.base.settings.resolution import resolve
from trainer.cluster.strategy import make_replicas
from trainer.proofs.rates import all_reduces

FEW, MANY = 100, 1_100  # operations in a call; their difference leaves the cost of the call out


@turn(alone=True)
def main() -> None:
    """Keeps seconds and GiB."""
    results, before = Results(), used_gib()
    replicas = make_replicas(
        resolve(
            ["--recipe=wgan_gp_digits", "--global_batch_size=840", *(["--replicas=2"] if rehearsing() else [])]
        ).config
    )
    device = replicas.devices[0]
    results.keep(launch_seconds=(_seconds(device, MANY) - _seconds(device, FEW)) / (MANY - FEW))
    after = used_gib()
    if before is not None and after is not None:
        held = tf.config.experimental.get_memory_info(device)["peak"] / 2**30
        results.keep(context_gib=max(0.0, after - before - held))
    if replicas.count > 1:
        times, kind = all_reduces(replicas, 0.1 if rehearsing() else 1.0, sizes=(4_096,))
        results.keep(all_reduce_seconds=times[0].seconds, collective=kind)
        later = used_gib()
        if later is not None and after is not None:
            results.keep(nccl_gib=max(0.0, later - after))


def _seconds(device: str, count: int) -> float:
    """Returns the least seconds of a call with `count` operations on (8,) numbers, each of which needs the last."""

    def chain(numbers: Any) -> Any:
        for _ in range(count):
            numbers = tf.math.tanh(numbers)
        return numbers

    function, taken = tf.function(chain), []
    with tf.device(device):
        numbers = tf.ones(8)
        for _ in range(12):
            began = time.perf_counter()
            function(numbers).numpy()
            taken.append(time.perf_counter() - began)
    return min(taken)


if __name__ == "__main__":
    main()
