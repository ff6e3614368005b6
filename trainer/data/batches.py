"""Assigns the rows of each step to replicas, as a function of (seed, step) only.

Each epoch is one permutation of all examples, cut into steps; a replica takes its rows of each global batch by index.
So the order of the data is the same on any number of replicas, and a run can start at any step.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from trainer.data.dataset import Examples, InOwnOrder, InSequence
from trainer.data.random_access import NumberedBatches, RandomAccess
from trainer.distribution.strategy import Replicas

Permutation = Callable[[int, Any], Any]  # (seed, number) -> every row number once, (examples,) int32

_ORDER_STREAM = 0x0D0E  # separates the permutations from a model's random numbers


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

    def gather(step_rows: Any) -> Any:
        mine = step_rows[:, first_row : first_row + local * rows]
        per_replica = tf.transpose(tf.reshape(mine, (schedule.batches_per_step, local, rows)), (1, 0, 2))
        return examples.gather(per_replica)

    def read(steps: tf.data.Dataset, threads: int) -> tf.data.Dataset:
        return steps.map(gather, num_parallel_calls=threads, deterministic=True)

    permutation = examples.permutation if isinstance(examples, InOwnOrder) else None
    if isinstance(examples, NumberedBatches):  # an epoch's batches are all read before the next epoch begins
        return row_order(schedule, first_step, permutation, partial(read, threads=examples.threads)).prefetch(4)
    threads = max(2, os.cpu_count() or 2) if isinstance(examples, RandomAccess) else 2
    return read(row_order(schedule, first_step, permutation), threads).prefetch(4)


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


def row_order(
    schedule: Schedule,
    first_step: int,
    permutation: Permutation | None = None,
    each_epoch: Callable[[tf.data.Dataset], tf.data.Dataset] = lambda steps: steps,
) -> tf.data.Dataset:
    """Returns the row numbers of every step from `first_step` on: (batches_per_step, global_batch_size) int32.

    `each_epoch` is applied to the row numbers of each epoch.
    """
    permutation = permutation or _shuffled(schedule.examples)
    first_epoch, first_of_epoch = divmod(first_step, schedule.steps_per_epoch)
    shape = (schedule.steps_per_epoch, schedule.batches_per_step, schedule.global_batch_size)
    # One permutation per epoch, or several if one step reads more examples than the dataset has.
    rounds = math.ceil(math.prod(shape) / schedule.examples)

    def epoch_rows(epoch: Any) -> tf.data.Dataset:
        done = tf.where(epoch == first_epoch, tf.constant(first_of_epoch, tf.int64), tf.constant(0, tf.int64))
        shuffled = [permutation(schedule.seed, epoch * rounds + round_) for round_ in range(rounds)]
        rows = tf.reshape(tf.concat(shuffled, axis=0)[: math.prod(shape)], shape)
        return each_epoch(tf.data.Dataset.from_tensor_slices(rows[done:]))

    return tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(epoch_rows)


def _shuffled(examples: int) -> Permutation:
    def permutation(seed: int, number: Any) -> Any:
        seeds = tf.stack([tf.constant(seed + (_ORDER_STREAM << 40), tf.int64), number])
        return tf.random.experimental.stateless_shuffle(tf.range(examples), seed=seeds, alg="philox")

    return permutation
