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

from trainer.base.settings.step_counts import Schedule
from trainer.cluster.strategy import Replicas
from trainer.data.examples import AnyExamples, Examples, InSequence, Parts
from trainer.data.order import RowNumbers


class ReplicaRows(NamedTuple):
    """Holds one replica's rows of a step on its device, as `copied_ahead` gives them."""

    parts: Parts  # (1, batches_per_step, rows, *example) each


_BLOCK_ROWS = 8192  # row numbers that are computed at once: they fit into a core's cache
_STEPS_AHEAD = 2  # steps whose rows are copied to a device in advance


def batches(
    examples: AnyExamples,
    schedule: Schedule,
    replicas: Replicas,
    first_step: int = 0,
    steps_per_element: int = 1,
    *,
    numbers: bool = False,
) -> Any:
    """Returns this worker's rows of every step from `first_step` on, without an end.

    Yields the parts (x,), (x, y) or (x, y, sample_weight) with a shape of (local replicas,
    batches_per_step, rows, *example) and the type of the source. Replica r of this worker gets the
    rows of each global batch that start at `replicas.first_row + r * replicas.rows`.
    `steps_per_element`: the number of steps in one element: (steps_per_element, local replicas, …);
    examples in memory are then also gathered for all of them at once. `numbers`: yields the row
    numbers in `examples.arrays` instead of rows; only for examples in memory.
    """

    # This worker's part of (batches_per_step, global_batch_size, …) is (local replicas,
    # batches_per_step, rows, …).
    def share(leaf: Any) -> Any:
        end = replicas.first_row + replicas.local * replicas.rows
        local_rows = leaf[:, replicas.first_row : end]
        shape = (schedule.batches_per_step, replicas.local, replicas.rows, *leaf.shape[2:])
        return tf.transpose(tf.reshape(local_rows, shape), (1, 0, *range(2, len(shape))))

    def grouped(steps: tf.data.Dataset) -> tf.data.Dataset:
        if steps_per_element == 1:
            return steps
        return steps.batch(steps_per_element, drop_remainder=True).prefetch(1)

    # A sequence is cut into steps pass by pass; the rows left over at the end of a pass are
    # dropped.
    if isinstance(examples, InSequence):
        whole_batches = examples.batches(schedule.global_batch_size, drop_remainder=True)
        steps = whole_batches.batch(schedule.batches_per_step, drop_remainder=True)
        steps = steps.repeat().skip(first_step)
        shares = steps.map(
            lambda *parts: tf.nest.map_structure(share, parts),
            num_parallel_calls=2,
            deterministic=True,
        )
        return grouped(shares.prefetch(4))

    # Other examples are gathered by the numbers of their rows.
    gathers_groups = steps_per_element > 1 and bool(examples.arrays) and not examples.ends_epochs

    def gather(rows: Any) -> Any:
        rows = rows[:, tf.newaxis] if gathers_groups else share(rows)
        return (examples.rows_of_arrays(rows),) if numbers else examples.gather(rows)

    def read(first: Any, end: Any) -> tf.data.Dataset:
        rows = row_numbers(examples, schedule, first, end)
        if gathers_groups:
            rows = grouped(rows)
        return rows.map(gather, num_parallel_calls=examples.threads, deterministic=True)

    def read_epoch(epoch: Any) -> tf.data.Dataset:
        first = epoch * schedule.whole_steps
        return read(tf.maximum(first, first_step), first + schedule.whole_steps)

    # Some must end an epoch before the order of the next one is asked for.
    if not examples.ends_epochs:
        steps = read(first_step, tf.int64.max)
        return steps.prefetch(2) if gathers_groups else grouped(steps.prefetch(4))
    epochs = tf.data.Dataset.range(first_step // schedule.whole_steps, tf.int64.max)
    return grouped(epochs.flat_map(read_epoch).prefetch(4))


def last_batches(
    examples: Examples, schedule: Schedule, replicas: Replicas, first_pass: int
) -> Any:
    """Returns this worker's rows of the smaller batch that ends each pass from `first_pass` on.

    replicas: for that batch, as `Replicas.of_batch` gives them. The parts are as in `batches`.
    """
    local = range(replicas.first, replicas.first + replicas.local)
    parts_of_replicas = [number // replicas.copies for number in local]

    # This worker's part of (rows of the batch, …) is (local replicas, 1, rows, …).
    def share(leaf: Any) -> Any:
        parts = tf.reshape(leaf, (-1, 1, replicas.rows, *leaf.shape[1:]))
        return tf.gather(parts, parts_of_replicas)

    # The batch has the last positions of each pass.
    positions = np.arange(schedule.examples - schedule.last, schedule.examples)

    def rows_of(number: Any) -> RowNumbers:
        return examples.order(schedule.seed, np.full_like(positions, number), positions)

    def batch(number: Any) -> Any:
        rows = tf.numpy_function(rows_of, [number], tf.int64, stateful=True)
        return tf.nest.map_structure(share, examples.gather(tf.ensure_shape(rows, positions.shape)))

    return tf.data.Dataset.range(first_pass, tf.int64.max).map(batch)


def copied_ahead(steps: tf.data.Dataset, replicas: Replicas) -> Any:
    """Returns an iterator over `steps`, which copies the rows of the next ones to devices ahead.

    `steps` is what `batches` returns. On several replicas it gives `ReplicaRows`, whose parts have
    a value per replica. Text stays on the host, which alone can hold it.
    """
    if any(part.dtype == tf.string for part in tf.nest.flatten(steps.element_spec)):
        return iter(steps)
    if replicas.count == 1:
        copies = tf.data.experimental.prefetch_to_device(replicas.devices[0], _STEPS_AHEAD)
        return iter(steps.apply(copies))
    rows = steps.unbatch().map(
        lambda *parts: ReplicaRows(tf.nest.map_structure(lambda part: part[tf.newaxis], parts))
    )
    # If the rows might end, workers would ask each other before each step whether there are more.
    endless = rows.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    ahead = tf.distribute.InputOptions(experimental_per_replica_buffer_size=_STEPS_AHEAD)
    return iter(replicas.strategy.distribute_datasets_from_function(lambda _: endless, ahead))


def row_numbers(examples: Examples, schedule: Schedule, first: Any, end: Any) -> tf.data.Dataset:
    """Returns the row numbers of the steps from `first` to below `end`.

    Those of a step are (batches_per_step, global_batch_size) int64. They are computed in blocks,
    one block ahead.
    """
    per_block = max(1, _BLOCK_ROWS // schedule.examples_per_step)

    # An epoch has one pass, or several if one step reads more examples than the dataset has.
    per_epoch = schedule.whole_steps * schedule.examples_per_step
    passes = math.ceil(per_epoch / schedule.examples)
    shape = (schedule.batches_per_step, schedule.global_batch_size)

    def rows_of(start: Any, stop: Any) -> RowNumbers:
        per_step = schedule.examples_per_step
        places = np.arange(start * per_step, stop * per_step, dtype=np.int64)
        epochs, of_epoch = np.divmod(places, per_epoch)
        pass_of_epoch, positions = np.divmod(of_epoch, schedule.examples)
        rows = examples.order(schedule.seed, epochs * passes + pass_of_epoch, positions)
        return rows.reshape(-1, *shape)

    def block(start: Any) -> Any:
        count = tf.minimum(tf.constant(per_block, tf.int64), end - start)
        rows = tf.numpy_function(rows_of, [start, start + count], tf.int64, stateful=True)
        return tf.ensure_shape(rows, (None, *shape))

    return tf.data.Dataset.range(first, end, per_block).map(block).prefetch(1).unbatch()
