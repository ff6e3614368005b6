"""Assigns the rows of each step to replicas, as a function of (seed, step) only.

Each epoch is one order of all examples, cut into steps; a replica takes its rows of each global batch by index. So the
order of the data is the same on any number of replicas, and a run can start at any step. No order is held in memory:
row numbers are computed from positions, some thousand at a time, ahead of the steps.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.data.dataset import Examples, InOwnOrder, InSequence, Subset
from trainer.data.order import Rows, shuffled
from trainer.data.random_access import NumberedBatches, RandomAccess
from trainer.distribution.strategy import Replicas

Order = Callable[[int, Rows, Rows], Rows]  # (seed, pass of each position, position in that pass) -> row numbers
_Read = Callable[[tf.data.Dataset], tf.data.Dataset]  # row numbers of steps -> their examples

_BLOCK_ROWS = 8192  # whose row numbers are computed at once: they fit into a core's cache


@dataclass(frozen=True)
class Schedule:
    """Describes how the examples of a dataset are divided into steps."""

    examples: int
    global_batch_size: int
    batches_per_step: int  # global batches that one step reads: critic_steps for a GAN with a critic, else 1
    seed: int

    @property
    def examples_per_step(self) -> int:
        """Returns the number of examples that all replicas read in one step."""
        return self.global_batch_size * self.batches_per_step

    @property
    def steps_per_epoch(self) -> int:
        """Returns the number of full steps in one pass over the examples; at least 1."""
        return max(1, self.examples // self.examples_per_step)

    def total_steps(self, steps: int | None, epochs: int | None) -> int:
        """Returns the number of steps of a run of `steps` steps or `epochs` epochs."""
        return steps or (epochs or 1) * self.steps_per_epoch


def batches(examples: Examples | InSequence, schedule: Schedule, replicas: Replicas, first_step: int = 0) -> Any:
    """Returns this worker's part of every step from `first_step` on, as an infinite tf.data.Dataset.

    Yields the parts (x,), (x, y) or (x, y, sample_weight) with a shape of (local replicas, batches_per_step, rows,
    *example) and the type of the source. Replica r of this worker gets the rows of each global batch that start at
    `replicas.first_row + r * replicas.rows`.
    """
    if isinstance(examples, InSequence):
        return _in_sequence(examples, schedule, replicas, first_step)
    first_row, rows, local = replicas.first_row, replicas.rows, replicas.local
    order = None
    if isinstance(examples, Subset):
        order, examples = partial(_shuffled_subset, examples), examples.examples

    def gather(step_rows: Any) -> Any:
        mine = step_rows[:, first_row : first_row + local * rows]
        per_replica = tf.transpose(tf.reshape(mine, (schedule.batches_per_step, local, rows)), (1, 0, 2))
        return examples.gather(per_replica)

    def read(steps: tf.data.Dataset, threads: int = 2) -> tf.data.Dataset:
        return steps.map(gather, num_parallel_calls=threads, deterministic=True)

    if isinstance(examples, NumberedBatches):  # an epoch's batches are all read before the next epoch begins
        return _in_own_order(examples, schedule, first_step, partial(read, threads=examples.threads)).prefetch(4)
    if isinstance(examples, InOwnOrder):
        return read(_in_own_order(examples, schedule, first_step, lambda steps: steps)).prefetch(4)
    threads = max(2, os.cpu_count() or 2) if isinstance(examples, RandomAccess) else 2
    return read(row_order(schedule, first_step, order), threads).prefetch(4)


def _in_sequence(examples: InSequence, schedule: Schedule, replicas: Replicas, first_step: int) -> Any:
    """Cuts one pass after another into steps; the rows left over at the end of a pass are dropped."""
    first_row, rows, local = replicas.first_row, replicas.rows, replicas.local
    per_step = schedule.batches_per_step

    def mine(*parts: Any) -> Any:
        def of_leaf(leaf: Any) -> Any:
            own = tf.reshape(leaf[:, first_row : first_row + local * rows], (per_step, local, rows, *leaf.shape[2:]))
            return tf.transpose(own, (1, 0, 2, *range(3, own.shape.rank)))

        return tf.nest.map_structure(of_leaf, parts)

    one_pass = examples.batches(schedule.global_batch_size, drop_remainder=True).batch(per_step, drop_remainder=True)
    return one_pass.repeat().skip(first_step).map(mine, num_parallel_calls=2, deterministic=True).prefetch(4)


def row_order(schedule: Schedule, first_step: int, order: Order | None = None) -> tf.data.Dataset:
    """Returns the row numbers of every step from `first_step` on: (batches_per_step, global_batch_size) int64."""
    return _steps(schedule, order or partial(_shuffled, schedule.examples), first_step, tf.int64.max)


def _in_own_order(examples: InOwnOrder, schedule: Schedule, first_step: int, read: _Read) -> tf.data.Dataset:
    """Returns what `read` gives for every step; the order of an epoch is asked for when that epoch begins."""
    per_epoch = schedule.steps_per_epoch

    def order(seed: int, passes: Rows, positions: Rows) -> Rows:
        rows = np.empty_like(positions)
        for number in np.unique(passes).tolist():
            places = passes == number
            rows[places] = examples.rows_at(seed, number, positions[places])
        return rows

    def of_epoch(epoch: Any) -> tf.data.Dataset:
        first = tf.maximum(epoch * per_epoch, first_step)
        return read(_steps(schedule, order, first, (epoch + 1) * per_epoch))

    return tf.data.Dataset.range(first_step // per_epoch, tf.int64.max).flat_map(of_epoch)


def _steps(schedule: Schedule, order: Order, first: Any, last: Any) -> tf.data.Dataset:
    """Returns the row numbers of the steps from `first` to below `last`, computed in blocks, one block ahead."""
    per_block = max(1, _BLOCK_ROWS // schedule.examples_per_step)
    # One pass per epoch, or several if one step reads more examples than the dataset has.
    per_epoch = schedule.steps_per_epoch * schedule.examples_per_step
    passes = math.ceil(per_epoch / schedule.examples)
    shape = (schedule.batches_per_step, schedule.global_batch_size)

    def rows_of(start: Any, stop: Any) -> Rows:
        read = np.arange(start * schedule.examples_per_step, stop * schedule.examples_per_step, dtype=np.int64)
        epochs, of_epoch = np.divmod(read, per_epoch)
        pass_of_epoch, positions = np.divmod(of_epoch, schedule.examples)
        return order(schedule.seed, epochs * passes + pass_of_epoch, positions).reshape(-1, *shape)

    def block(start: Any) -> Any:
        count = tf.minimum(tf.constant(per_block, tf.int64), last - start)
        rows = tf.numpy_function(rows_of, [start, start + count], tf.int64, stateful=True)
        return tf.ensure_shape(rows, (None, *shape))

    return tf.data.Dataset.range(first, last, per_block).map(block).prefetch(1).unbatch()


def _shuffled(examples: int, seed: int, passes: Rows, positions: Rows) -> Rows:
    return shuffled(positions, examples, seed, "order", passes)


def _shuffled_subset(subset: Subset, seed: int, passes: Rows, positions: Rows) -> Rows:
    return subset.located(_shuffled(subset.count, seed, passes, positions))
