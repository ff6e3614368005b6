"""What each saving in the talk between two workers brings, and what was not kept: `python -m benchmarks.talk`.

Every contender is two workers of one core each on wgan_gp; one differs from ours in one thing, which is changed here.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from benchmarks import ours
from benchmarks.digits import images_a_step, on_digits
from benchmarks.measure import alternate, base_parser, counts, keep, run_main, table
from benchmarks.turns import Contender, Run, Work, started
from trainer.build import TrainingSetup
from trainer.config.train_config import TrainConfig
from trainer.data.batches import batches
from trainer.distribution import gradients
from trainer.models import layers
from trainer.training.steps import StepRunner

RECIPE = ["--recipe=wgan_gp_mnist"]
APART, TOGETHER = "--sync_batch_norm=false", "--sync_batch_norm=true"
CONTENDERS = {
    "ours": ("", APART),
    "one all-reduce a variable": ("unpacked", APART),
    "losses summed at each step": ("every_step", APART),
    "TensorFlow's distributed iterator": ("iterator", APART),
    "gradients sent as bfloat16": ("bfloat16", APART),
    "gradients in messages of 256 KiB": ("pieces", APART),
    "two threads within an operation": ("threads_within", APART),
    "four threads between operations": ("threads_between", APART),
    "batch norm synchronised": ("", TOGETHER),
    "batch norm synchronised by Keras": ("keras_batch_norm", TOGETHER),
}

_packed, _replica_step = gradients.all_reduce_sum, StepRunner._replica_step


def _unpacked(tensors: Sequence[Any]) -> list[Any]:
    return [_packed([tensor])[0] for tensor in tensors]


def _as_bfloat16(tensors: Sequence[Any]) -> list[Any]:
    summed = _packed([tf.cast(tensor, tf.bfloat16) for tensor in tensors])
    return [tf.cast(one, tensor.dtype) for one, tensor in zip(summed, tensors, strict=True)]


def _in_pieces(tensors: Sequence[Any]) -> list[Any]:
    cut = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=2**18)
    return list(tf.distribute.get_replica_context().all_reduce("sum", list(tensors), cut))


def _summed_at_once(runner: StepRunner, batch: Any, step: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce("sum", _replica_step(runner, batch, step))


def _distributed(assembly: TrainingSetup, first_step: int) -> Any:
    def rows(_: tf.distribute.InputContext) -> tf.data.Dataset:
        return batches(assembly.dataset.train, assembly.schedule, assembly.replicas, first_step)

    return iter(assembly.replicas.strategy.distribute_datasets_from_function(rows))


def _keras_batch_norm(momentum: float) -> keras.layers.Layer:
    return keras.layers.BatchNormalization(momentum=momentum, synchronized=True)


CHANGES: dict[str, Callable[[], Any]] = {
    "unpacked": partial(mock.patch.object, gradients, "all_reduce_sum", _unpacked),
    "bfloat16": partial(mock.patch.object, gradients, "all_reduce_sum", _as_bfloat16),
    "pieces": partial(mock.patch.object, gradients, "all_reduce_sum", _in_pieces),
    "threads_within": partial(mock.patch.dict, os.environ, TF_NUM_INTRAOP_THREADS="2"),
    "threads_between": partial(mock.patch.dict, os.environ, TF_NUM_INTEROP_THREADS="4"),
    "every_step": partial(mock.patch.object, StepRunner, "_replica_step", _summed_at_once),
    "iterator": partial(mock.patch.object, TrainingSetup, "rows_from", _distributed),
    "keras_batch_norm": partial(mock.patch.object, layers, "SyncBatchNormalization", _keras_batch_norm),
}


def contender(config: TrainConfig, option: str = "") -> tuple[Run, Work]:
    """Ours but for what `option` names in CHANGES, for the life of the process."""
    if option:
        CHANGES[option]().start()
    return ours.contender(config)


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = base_parser(__doc__, repeats=5, seconds=3.0)
    parser.add_argument("--batches", type=counts, default="64,256", help="global batch sizes (default: %(default)s)")
    return parser


def main() -> None:
    """Prints one table a batch and keeps the raw numbers."""
    options = make_parser().parse_args()
    raw, began = {}, time.monotonic()
    for batch in options.batches:
        with on_digits([*RECIPE, f"--global_batch_size={batch}"]) as (config, given):
            makers: dict[str, Callable[[], Contender]] = {
                name: partial(Contender, f"talk:{what}", [*given, flag], images_a_step(config), 2, joined=True)
                for name, (what, flag) in CONTENDERS.items()
            }
            with started(makers, options.seconds) as contenders:
                found = alternate(contenders, options.repeats)
        raw[f"batch {batch}"] = found
        print("\n".join([f"\nwgan_gp 32x32, global batch {batch}", "", *table(found, "ours", "images/s")]), flush=True)
    command = " ".join(["python -m benchmarks.talk", *sys.argv[1:]])
    keep("talk", {"command": command, "images_per_second": raw, "seconds": round(time.monotonic() - began)})


if __name__ == "__main__":
    run_main(main)
