"""Assigns the rows of each step to replicas, as a function of (seed, step) only.

Each pass is one order of all examples, cut into steps; a replica takes its rows of each global
batch by index. So the order of the data is the same on any number of replicas, and a run can start
at any step. No order is held in memory: row numbers are computed from positions, a few thousand at
a time, ahead of the steps.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.base.settings.schedule import Schedule
from trainer.cluster.strategy import Replicas
from trainer.data.examples import AnyExamples, Examples, InSequence, Parts
from trainer.data.order import RowNumbers


class ReplicaRows(NamedTuple):
    """Holds what `copied_ahead` gives on several replicas: one replica's rows of a step, on its
    device."""

    parts: Parts  # (1, batches_per_step, rows, *example) each


_BLOCK_ROWS = 8192  # row numbers that are computed at once: they fit into a core's cache
_STEPS_AHEAD = 2  # steps whose rows are copied to a device in advance


def batches(
    examples: AnyExamples,
    schedule: Schedule,
    replicas: Replicas,
    first_step: int = 0,
    at_once: int = 1,
    *,
    numbers: bool = False,
) -> Any:
    """Returns this worker's rows of every step from `first_step` on, as an infinite
    tf.data.Dataset.

    Yields the parts (x,), (x, y) or (x, y, sample_weight) with a shape of (local replicas,
    batches_per_step, rows, *example) and the type of the source. Replica r of this worker gets the
    rows of each global batch that start at `replicas.first_row + r * replicas.rows`. `at_once`: the
    number of steps in one element: (at_once, local replicas, …); examples in memory are then also
    gathered for all of them at once. `numbers`: yields the row numbers in `examples.arrays` instead
    of rows; only for examples in memory.
    """

    def share(leaf: Any) -> Any:
        """Returns (local replicas, batches_per_step, rows, …) of (batches_per_step,
        global_batch_size, …)."""
        local_rows = leaf[
            :, replicas.first_row : replicas.first_row + replicas.local * replicas.rows
        ]
        shape = (schedule.batches_per_step, replicas.local, replicas.rows, *leaf.shape[2:])
        return tf.transpose(tf.reshape(local_rows, shape), (1, 0, *range(2, len(shape))))

    def grouped(steps: tf.data.Dataset) -> tf.data.Dataset:
        return steps.batch(at_once, drop_remainder=True).prefetch(1) if at_once > 1 else steps

    if isinstance(examples, InSequence):
        # One pass after another is cut into steps; the rows left over at the end of a pass are
        # dropped.
        one_pass = examples.batches(schedule.global_batch_size, drop_remainder=True)
        steps = (
            one_pass.batch(schedule.batches_per_step, drop_remainder=True).repeat().skip(first_step)
        )
        shares = steps.map(
            lambda *parts: tf.nest.map_structure(share, parts),
            num_parallel_calls=2,
            deterministic=True,
        )
        return grouped(shares.prefetch(4))
    gathers_groups = at_once > 1 and bool(examples.arrays) and not examples.ends_epochs

    def gather(rows: Any) -> Any:
        rows = rows[:, tf.newaxis] if gathers_groups else share(rows)
        return (examples.rows_of_arrays(rows),) if numbers else examples.gather(rows)

    def read(first: Any, end: Any) -> tf.data.Dataset:
        rows = row_order(examples, schedule, first, end)
        if gathers_groups:
            rows = grouped(rows)
        return rows.map(gather, num_parallel_calls=examples.threads, deterministic=True)

    def read_epoch(epoch: Any) -> tf.data.Dataset:
        return read(
            tf.maximum(epoch * schedule.whole_steps, first_step), (epoch + 1) * schedule.whole_steps
        )

    if not examples.ends_epochs:
        steps = read(first_step, tf.int64.max)
        return steps.prefetch(2) if gathers_groups else grouped(steps.prefetch(4))
    epochs = tf.data.Dataset.range(first_step // schedule.whole_steps, tf.int64.max)
    return grouped(epochs.flat_map(read_epoch).prefetch(4))


def last_batches(
    examples: Examples, schedule: Schedule, replicas: Replicas, first_pass: int
) -> Any:
    """Returns this worker's rows of the smaller batch that ends each pass from `first_pass` on, as
    a tf.data.Dataset.

    replicas: for that batch, as `Replicas.of_batch` gives them. The parts are as in `batches`.
    """
    first = replicas.first

    def share(leaf: Any) -> Any:
        """Returns (local replicas, 1, rows, …) of (rows of the batch, …)."""
        parts = tf.reshape(leaf, (-1, 1, replicas.rows, *leaf.shape[1:]))
        return tf.gather(
            parts, [place // replicas.copies for place in range(first, first + replicas.local)]
        )

    positions = np.arange(schedule.examples - schedule.last, schedule.examples)

    def rows_of(number: Any) -> RowNumbers:
        return examples.order(schedule.seed, np.full_like(positions, number), positions)

    def batch(number: Any) -> Any:
        rows = tf.numpy_function(rows_of, [number], tf.int64, stateful=True)
        return tf.nest.map_structure(share, examples.gather(tf.ensure_shape(rows, positions.shape)))

    return tf.data.Dataset.range(first_pass, tf.int64.max).map(batch)


def copied_ahead(steps: tf.data.Dataset, replicas: Replicas) -> Any:
    """Returns an iterator over what `batches` returns, which copies the rows of the next steps to
    devices in advance.

    On several replicas it gives `ReplicaRows`, whose parts have a value per replica. Text stays on
    the host, which alone can hold it.
    """
    if any(part.dtype == tf.string for part in tf.nest.flatten(steps.element_spec)):
        return iter(steps)
    if replicas.count == 1:
        return iter(
            steps.apply(tf.data.experimental.prefetch_to_device(replicas.devices[0], _STEPS_AHEAD))
        )
    rows = steps.unbatch().map(
        lambda *parts: ReplicaRows(tf.nest.map_structure(lambda part: part[tf.newaxis], parts))
    )
    # If the rows might end, workers would ask each other before each step whether there are more.
    endless = rows.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    ahead = tf.distribute.InputOptions(experimental_per_replica_buffer_size=_STEPS_AHEAD)
    return iter(replicas.strategy.distribute_datasets_from_function(lambda _: endless, ahead))


def row_order(examples: Examples, schedule: Schedule, first: Any, end: Any) -> tf.data.Dataset:
    """Returns the row numbers of the steps from `first` to below `end`: (batches_per_step,
    global_batch_size) int64.

    They are computed in blocks, one block ahead.
    """
    per_block = max(1, _BLOCK_ROWS // schedule.examples_per_step)
    # One pass per epoch, or several if one step reads more examples than the dataset has.
    per_epoch = schedule.whole_steps * schedule.examples_per_step
    passes = math.ceil(per_epoch / schedule.examples)
    shape = (schedule.batches_per_step, schedule.global_batch_size)

    def rows_of(start: Any, stop: Any) -> RowNumbers:
        read = np.arange(
            start * schedule.examples_per_step, stop * schedule.examples_per_step, dtype=np.int64
        )
        epochs, of_epoch = np.divmod(read, per_epoch)
        pass_of_epoch, positions = np.divmod(of_epoch, schedule.examples)
        return examples.order(schedule.seed, epochs * passes + pass_of_epoch, positions).reshape(
            -1, *shape
        )

    def block(start: Any) -> Any:
        count = tf.minimum(tf.constant(per_block, tf.int64), end - start)
        rows = tf.numpy_function(rows_of, [start, start + count], tf.int64, stateful=True)
        return tf.ensure_shape(rows, (None, *shape))

    return tf.data.Dataset.range(first, end, per_block).map(block).prefetch(1).unbatch()
