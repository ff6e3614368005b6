"""Trains on two halves of one GPU's memory as two GPUs: `python -m benchmarks.gpu.halves`.

NCCL takes no two replicas on one card, so TensorFlow sums by its ring; all else is as on two GPUs.
"""

import json
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import tensorflow as tf

from benchmarks.gpu.execution import Results, rehearsing, turn
from benchmarks.runner import count, make_parser
from trainer.base.settings.resolution import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster import strategy
from trainer.proofs import on_gpus
from trainer.run.replica_check import compare_bits

FLAGS = ["--recipe=wgan_gp_digits", "--critic_steps=2", "--data=digits"]
SMALL = ["--width=4", "--global_batch_size=8"]
RECIPES = ("wgan_gp_digits", "cnn_mnist", "dcgan_mnist")
PARSER = make_parser(__doc__)
PARSER.add_argument("--memory_mib", type=count, default=3_072, help="of each half (default: %(default)s)")
PARSER.add_argument("--bits", choices=RECIPES, help="compare virtual replicas of this recipe in this process")


def main() -> None:
    """Keeps the lines of the check's table, and whether virtual replicas have equal bits on one half and on both."""
    options = PARSER.parse_args()
    devices = _halves(options.memory_mib)

    def taken(config: TrainConfig, cluster: Any) -> tuple[str, ...]:
        return devices[: config.replicas or 2]

    with patch.object(strategy, "local_devices", taken), patch.object(on_gpus, "local_devices", taken):
        if options.bits:
            print(json.dumps(_differing_bits(options.bits)))
        else:
            with turn(alone=False):
                _check(Results(), options.memory_mib)


def _check(results: Results, mib: int) -> None:
    plain = on_gpus.variants(2, on_gpus=False)  # XLA's sums over GPUs are NCCL's

    def keep(content: dict[str, Any]) -> str:
        results.keep(check=content)
        return "the results"

    differing: dict[str, list[str]] = {}
    for recipe in RECIPES:  # in processes of their own: before determinism, kernels are chosen by time
        command = [sys.executable, "-m", "benchmarks.gpu.halves", f"--memory_mib={mib}", f"--bits={recipe}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        differing[recipe] = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else ["it failed"]
        results.keep(differing_bits=differing)
    with patch.object(on_gpus, "variants", lambda *_, **__: plain):
        on_gpus.check_on_gpus(resolve([*FLAGS, *(SMALL if rehearsing() else [])]).config, keep, 0.2)


def _differing_bits(recipe: str) -> list[str]:
    flags = [f"--recipe={recipe}", "--data=digits", "--virtual_replicas=2", "--deterministic=true"]
    return compare_bits(resolve([*flags, *(SMALL if rehearsing() else [])]).config, 2)


def _halves(mib: int) -> tuple[str, str]:
    """Returns two logical GPUs on the first one; two logical CPUs in a rehearsal."""
    kind = "CPU" if rehearsing() else "GPU"
    limit = tf.config.LogicalDeviceConfiguration(memory_limit=None if rehearsing() else mib)
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices(kind)[0], [limit] * 2)
    return f"{kind}:0", f"{kind}:1"


if __name__ == "__main__":
    main()
