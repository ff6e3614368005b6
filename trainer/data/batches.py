"""Which rows of which step go to which replica: a function of (seed, step) only.

Each epoch is one permutation of all examples, cut into steps; a replica takes its rows of each global batch by index.
So the order of the data is the same on any number of replicas, and a run can begin at any step.
"""

import math
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer.data.dataset import Examples

_ORDER_STREAM = 0x0D0E  # keeps the permutations apart from a model's own draws


@dataclass(frozen=True)
class Schedule:
    """How the examples of a dataset are spread over steps."""

    examples: int
    global_batch_size: int
    batches_per_step: int  # global batches that one step reads: critic_steps for a GAN with a critic, else 1
    seed: int

    @property
    def examples_per_step(self) -> int:
        return self.global_batch_size * self.batches_per_step

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.examples // self.examples_per_step)

    def total_steps(self, steps: int | None, epochs: int | None) -> int:
        """The length of a run that is `steps` steps or `epochs` epochs long."""
        return steps or (epochs or 1) * self.steps_per_epoch


def batches(
    examples: Examples, schedule: Schedule, *, first_step: int, first_row: int, rows: int, replicas: int
) -> tf.data.Dataset:
    """This worker's part of every step from `first_step` on, without end.

    Yields (images, labels), or (images,) where there are no labels. images: (replicas, batches_per_step, rows,
    height, width, channels) in their own dtype; labels: (replicas, batches_per_step, rows). Replica r of this
    worker gets rows `first_row + r * rows` and on of each global batch.
    """

    def gather(step_rows: Any) -> Any:
        mine = step_rows[:, first_row : first_row + replicas * rows]
        per_replica = tf.transpose(tf.reshape(mine, (schedule.batches_per_step, replicas, rows)), (1, 0, 2))
        return examples.gather(per_replica)

    order = row_order(schedule, first_step)
    return order.map(gather, num_parallel_calls=2, deterministic=True).prefetch(4)


def row_order(schedule: Schedule, first_step: int) -> tf.data.Dataset:
    """Row numbers of every step from `first_step` on: (batches_per_step, global_batch_size) int32."""
    first_epoch, first_of_epoch = divmod(first_step, schedule.steps_per_epoch)
    per_epoch = schedule.steps_per_epoch * schedule.examples_per_step
    shape = (schedule.steps_per_epoch, schedule.batches_per_step, schedule.global_batch_size)

    def epoch_rows(epoch: Any) -> tf.data.Dataset:
        done = tf.where(epoch == first_epoch, tf.constant(first_of_epoch, tf.int64), tf.constant(0, tf.int64))
        rows = tf.reshape(_permutations(schedule, epoch, per_epoch), shape)
        return tf.data.Dataset.from_tensor_slices(rows[done:])

    return tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(epoch_rows)


def _permutations(schedule: Schedule, epoch: Any, count: int) -> Any:
    """The first `count` rows of one permutation, or of several where one step reads more than there are examples."""
    rounds = math.ceil(count / schedule.examples)
    first_seed = tf.constant(schedule.seed + (_ORDER_STREAM << 40), tf.int64)
    shuffled = [
        tf.random.experimental.stateless_shuffle(
            tf.range(schedule.examples),
            seed=tf.stack([first_seed, epoch * rounds + round_]),
            alg="philox",
        )
        for round_ in range(rounds)
    ]
    return tf.concat(shuffled, axis=0)[:count]
