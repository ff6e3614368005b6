"""Prints how many bytes a step holds at most, above what lies there between steps: `python -m
tests.step_memory FLAGS`.

They are those of TensorFlow's own allocator, as on a GPU.
"""

import sys

import tensorflow as tf

from tests.support import small
from tests.workers import ROOT, python
from trainer.cluster.strategy import make_replicas
from trainer.run.training_setup import build_setup


def peak(*flags: str) -> int:
    """Returns the number, of a process of its own."""
    return counted("-m", __name__, *flags)


def counted(*program: str) -> int:
    """Returns the number that a Python program prints last; in it TensorFlow counts memory on every
    processor."""
    # With the same kernels on every processor: those without oneDNN need memory of their own.
    done = python(
        *program,
        TF_CPU_ALLOCATOR_USE_BFC="1",
        TF_ENABLE_ONEDNN_OPTS="1",
        PYTHONPATH=str(ROOT),
    )
    return int(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    config = small(*sys.argv[1:])
    setup = build_setup(config, make_replicas(config))
    runner = setup.step_runner()
    rows = setup.rows_from(0)
    runner(rows, 0, 1)
    between = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    runner(rows, 0, 1)
    print(tf.config.experimental.get_memory_info("CPU:0")["peak"] - between)
