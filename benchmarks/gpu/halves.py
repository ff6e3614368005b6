"""Trains on two halves of one GPU's memory as two GPUs: `python -m benchmarks.gpu.halves`.

NCCL takes no two replicas on one card, so TensorFlow sums by its ring; all else is as on two GPUs.
"""

from typing import Any
from unittest.mock import patch

import tensorflow as tf

from benchmarks.gpu.execution import Results, rehearsing, turn
from benchmarks.runner import count, make_parser
from benchmarks.trainer_loop import fresh_collectives
from trainer.base.settings.resolution import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster import strategy
from trainer.proofs import on_gpus
from trainer.run.replica_check import compare_bits

FLAGS = ["--recipe=wgan_gp_digits", "--critic_steps=2", "--data=digits"]
SMALL = ["--width=4", "--global_batch_size=8"]
PARSER = make_parser(__doc__)
PARSER.add_argument("--memory_mib", type=count, default=3_072, help="of each half (default: %(default)s)")


def main() -> None:
    """Keeps the lines of the check's table, then whether virtual replicas have equal bits on one half and on both."""
    options, results = PARSER.parse_args(), Results()
    devices = _halves(options.memory_mib)
    flags = [*FLAGS, *(SMALL if rehearsing() else [])]

    def keep(content: dict[str, Any]) -> str:
        results.keep(check=content)
        return "the results"

    def taken(config: TrainConfig, cluster: Any) -> tuple[str, ...]:
        return devices[: config.replicas or 2]

    plain = on_gpus.variants(2, on_gpus=False)  # XLA's sums over GPUs are NCCL's
    with turn(alone=False), patch.object(strategy, "local_devices", taken):
        with patch.multiple(on_gpus, local_devices=taken, variants=lambda *_, **__: plain):
            on_gpus.check_on_gpus(resolve(flags).config, keep, 0.2)
        fresh_collectives()
        virtual = resolve([*flags, "--virtual_replicas=2", "--deterministic=true"]).config
        results.keep(differing_bits=compare_bits(virtual, 2))


def _halves(mib: int) -> tuple[str, str]:
    """Returns two logical GPUs on the first one; two logical CPUs in a rehearsal."""
    kind = "CPU" if rehearsing() else "GPU"
    limit = tf.config.LogicalDeviceConfiguration(memory_limit=None if rehearsing() else mib)
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices(kind)[0], [limit] * 2)
    return f"{kind}:0", f"{kind}:1"


if __name__ == "__main__":
    main()
