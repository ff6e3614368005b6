"""Adds what micro-batches and replicas give; with --virtual_replicas in the fixed order of a binary
tree.

Each micro-batch of a virtual replica is a leaf. A replica has whole branches, so that the order of
all additions, and with it every bit of the sum, is the same on any number of replicas.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def add_micro_batch(sums: list[tuple[int, Any]], total: Any, *, in_tree: bool) -> None:
    """Adds the nest `total` of one more micro-batch to `sums`.

    Each sum has its number of micro-batches before it. in_tree: only sums of equally many
    micro-batches are added; else there is one sum.
    """
    count = 1
    if in_tree:
        total = tf.nest.map_structure(dense, total)
    while sums and (sums[-1][0] == count or not in_tree):
        earlier_count, earlier = sums.pop()
        total = tf.nest.map_structure(_added, earlier, total)
        count += earlier_count
    sums.append((count, total))


def sum_over_replicas(tensors: Sequence[Any]) -> list[Any]:
    """Returns each tensor's sum over replicas, whose branches are added in pairs.

    None stays None.
    """
    replica = tf.distribute.get_replica_context()
    present = [tf.expand_dims(tensor, 0) for tensor in tensors if tensor is not None]
    if replica.num_replicas_in_sync == 1 or not present:
        return list(tensors)
    sums = []
    for tensor, gathered in zip(present, replica.all_gather(present, axis=0), strict=True):
        gathered.set_shape((replica.num_replicas_in_sync, *tensor.shape[1:]))
        branches = tf.unstack(gathered)
        # Their number is a power of 2: they are added in pairs, and these sums in pairs again.
        while len(branches) > 1:
            pairs = zip(branches[::2], branches[1::2], strict=True)
            branches = [first + second for first, second in pairs]
        sums += branches
    summed = iter(sums)
    return [None if tensor is None else next(summed) for tensor in tensors]


def dense(gradient: Any) -> Any:
    """Returns IndexedSlices as a tensor as large as their table; any other gradient unchanged."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, gradient.dense_shape[0])


def _added(first: Any, second: Any) -> Any:
    """Returns the sum of two gradients or other tensors; None counts as nothing."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices):
        values = tf.concat([first.values, second.values], 0)
        indices = tf.concat([first.indices, second.indices], 0)
        return tf.IndexedSlices(values, indices, first.dense_shape)
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)
