"""Measures the memory of CUDA's context, which plans take from gpu_constants.json."""

import tensorflow as tf

from benchmarks.gpu.part import keep, nvidia, turn
from trainer.base.settings.request import Overrides
from trainer.cluster.strategy import make_replicas


@turn(alone=True)
def main() -> None:
    """Keeps GiB; nothing under MIG, where nvidia-smi says [N/A]."""
    before = nvidia("memory.used")
    config = Overrides.parse(["--recipe=wgan_gp_digits", "--replicas=1"]).config
    (device,) = make_replicas(config).devices
    with tf.device(device):
        tf.math.tanh(tf.ones(8)).numpy()
    after = nvidia("memory.used")
    if before and before[0].isdecimal() and after[0].isdecimal():
        held = tf.config.experimental.get_memory_info(device)["peak"]
        keep(context_gib=max(0.0, (int(after[0]) - int(before[0])) / 1024 - held / 2**30))


if __name__ == "__main__":
    main()
