"""Measures what plans assume of any GPU: the time to start an operation, and the memory of CUDA's context."""

from typing import Any

import tensorflow as tf

from benchmarks.gpu.part import keep, nvidia, turn
from benchmarks.runner import elapsed
from trainer.base.settings.resolution import resolve
from trainer.cluster.strategy import make_replicas

FEW, MANY = 100, 1_100  # operations in a call; their difference leaves the cost of the call out


@turn(alone=True)
def main() -> None:
    """Keeps seconds and GiB."""
    before = nvidia("memory.used")
    (device,) = make_replicas(resolve(["--recipe=wgan_gp_digits", "--replicas=1"]).config).devices
    keep(launch_seconds=(_seconds(device, MANY) - _seconds(device, FEW)) / (MANY - FEW))
    after = nvidia("memory.used")
    if before and before[0].isdecimal() and after[0].isdecimal():  # under MIG it is [N/A]
        held = tf.config.experimental.get_memory_info(device)["peak"]
        keep(context_gib=max(0.0, (int(after[0]) - int(before[0])) / 1024 - held / 2**30))


def _seconds(device: str, count: int) -> float:
    """Returns the least seconds of a call with `count` operations on (8,) numbers, each of which needs the last."""

    def chain(numbers: Any) -> Any:
        for _ in range(count):
            numbers = tf.math.tanh(numbers)
        return numbers

    function = tf.function(chain)
    with tf.device(device):
        numbers = tf.ones(8)
        return min(elapsed(lambda: function(numbers).numpy()) for _ in range(12))


if __name__ == "__main__":
    main()
