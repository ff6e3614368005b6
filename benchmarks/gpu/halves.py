"""Trains on two halves of one GPU's memory as on two GPUs: `python -m benchmarks.gpu.halves
[--bits=RECIPE]`.

NCCL takes no two replicas on one card, so TensorFlow sums by its ring; all else is as on two GPUs.
Without --bits it runs the check of GPUs; with it, it compares virtual replicas on one half and on
both, in all bits.
"""

from dataclasses import replace
from unittest.mock import patch

import tensorflow as tf

from benchmarks.gpu.part import keep, nvidia, turn
from benchmarks.runner import make_parser
from trainer.base.settings.request import Overrides
from trainer.checks.on_gpus import checked
from trainer.cluster import strategy
from trainer.run.replica_check import compare_bits

RECIPES = ("wgan_gp_digits", "cnn_mnist", "dcgan_mnist")
HALF_MIB = 3_072  # other parts may run beside this one
PARSER = make_parser(__doc__)
PARSER.add_argument("--bits", choices=RECIPES, help="compare virtual replicas of this recipe")


@turn(alone=False)
def main() -> None:
    """Keeps the check's table and problems, or the variables that have other bits."""
    recipe = PARSER.parse_args().bits
    kind = "GPU" if nvidia("name") else "CPU"
    small = [] if kind == "GPU" else ["--width=4", "--global_batch_size=8"]
    half = tf.config.LogicalDeviceConfiguration(memory_limit=HALF_MIB if kind == "GPU" else None)
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices(kind)[0], [half] * 2)
    with patch.object(
        strategy,
        "local_devices",
        lambda config, cluster: (f"{kind}:0", f"{kind}:1")[: config.replicas],
    ):
        if recipe:
            flags = [
                f"--recipe={recipe}",
                "--data=digits",
                "--virtual_replicas=2",
                "--deterministic",
                *small,
            ]
            keep(other_bits=compare_bits(Overrides.parse(flags).config, 2))
        else:
            config = Overrides.parse(
                ["--recipe=wgan_gp_digits", "--critic_steps=2", "--replicas=2", *small]
            ).config
            check = checked(
                config, replace(strategy.make_replicas(config), collectives="ring"), 0.2
            )
            keep(
                table=[*check.table()],
                problems=[f"{row.name}: {row.problem}" for row in check.rows if row.problem],
            )


if __name__ == "__main__":
    main()
