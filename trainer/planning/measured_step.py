"""Builds a run's model for some rows of each replica, on the CPU, and runs steps of it on generated rows.

The rows repeat the first ones of the data. Data set, prefetched batches and iterators, which stay on the host of a GPU,
are none of what a step allocates: every step gets the same tensors.
"""

import dataclasses
import math
from typing import Any

import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.data.dataset import Dataset
from trainer.invariance.gradients import with_tables_as_of
from trainer.invariance.reachable import optimizers_of
from trainer.invariance.sharded_slots import slots_to_shard
from trainer.models.image_layers import as_on_gpus
from trainer.run.training_setup import set_precision_and_seed, setup_with
from trainer.training.state import variables_of
from trainer.user_code.interface import ModelInterface

_REPEATED_ROWS = 16


class MeasuredStep:
    """Builds the model and the step of one number of rows on each of so many logical CPUs.

    In float32 where the run's precision has 16 bits, and without XLA: its operations on a CPU are not those on a GPU.
    """

    def __init__(self, config: TrainConfig, dataset: Dataset, rows: int, replicas: int = 1) -> None:
        rows_of_run = config.global_batch_size / replicas
        precision = "float32" if config.precision.startswith("mixed") else config.precision
        config = dataclasses.replace(
            config, global_batch_size=rows * replicas, replicas=replicas, strategy="auto", expect_devices=0,
            precision=precision, jit_compile="false", micro_batches=1, virtual_replicas=0, shard_optimizer=False,
        )  # fmt: skip
        self._times_rows = rows_of_run / rows
        set_precision_and_seed(config)
        with as_on_gpus():
            setup = setup_with(config, make_replicas(config), dataset)
        self.model, self.rows, self.replicas, self._made = setup.model, rows, replicas, 0
        self.batches_per_step = ModelInterface.of(setup.model).batches_per_step
        self._runner = setup.step_runner()
        parts = _generated(dataset, (replicas, self.batches_per_step, rows))
        self._rows = iter(tf.data.Dataset.from_tensors(parts).repeat())

    @property
    def graph(self) -> Any:
        """Returns the graph of the loop over steps, traced now if no step was run yet."""
        with as_on_gpus(), with_tables_as_of(self._times_rows):
            return self._runner.traced(self._rows).graph

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of all variables: weights, optimizers, averages."""
        return sum(map(_bytes, variables_of(self.model).values()))

    @property
    def trained_bytes(self) -> int:
        """Returns the bytes of the weights that have gradients."""
        return sum(map(_bytes, self.model.trainable_variables))

    def sharded_bytes(self, *, averages: bool) -> int:
        """Returns the bytes of which --shard_optimizer keeps 1/N on each of N replicas; 0 if it is refused."""
        try:
            return sum(
                _bytes(slot) for optimizer in optimizers_of(self.model)
                for slot, _ in slots_to_shard(optimizer, 2, averages=averages)
            )  # fmt: skip
        except UserError:
            return 0

    def __call__(self) -> None:
        """Runs one step."""
        with as_on_gpus():  # the first call traces
            self._runner(self._rows, self._made, 1)
        self._made += 1


def _generated(dataset: Dataset, shape: tuple[int, int, int]) -> Any:
    """Returns parts of shape (replicas, batches, rows, …), as `trainer.data.batches` yields them."""

    def repeated(part: Any) -> Any:
        tensor = tf.convert_to_tensor(part)
        places = tf.range(math.prod(shape)) % tf.shape(tensor)[0]
        return tf.reshape(tf.gather(tensor, places), (*shape, *tensor.shape[1:]))

    return tf.nest.map_structure(repeated, dataset.train.first(_REPEATED_ROWS))


def _bytes(variable: Any) -> int:
    return math.prod(map(int, variable.shape)) * int(tf.as_dtype(variable.dtype).size)
