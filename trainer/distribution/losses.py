"""Reduces a Keras loss over the rows of all replicas, as one device would over the global batch."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer.distribution.gradients import all_reduce_sum

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def reduce_to_mean(original: Callable[..., Any], *given: Any) -> Any:
    """Returns a value of which the mean over replicas is the loss of the global batch, as `reduce_over_replicas`."""
    replica = tf.distribute.get_replica_context()
    return reduce_over_replicas(original, *given) * (replica.num_replicas_in_sync if replica else 1)


def reduce_over_replicas(
    original: Callable[..., Any], values: Any, sample_weight: Any, mask: Any, reduction: Any, dtype: Any
) -> Any:
    """Returns this replica's part of the loss of the global batch: the parts of all replicas add up to it.

    `original`: Keras's reduction over one device's rows, with the same parameters; values: (rows, …) losses. Keras
    itself divides the mean over a replica's rows by the number of replicas, which is not the mean over all rows where
    rows count differently: with masks, or with the reduction mean_with_sample_weight. A loss that is one number already
    counts as a mean over the replica's rows. All replicas must have the same number of rows.
    """
    replica = tf.distribute.get_replica_context()
    replicas = replica.num_replicas_in_sync if replica else 1
    if replicas == 1 or reduction not in _MEANS:
        return original(values, sample_weight, mask, reduction, dtype)
    values = tf.convert_to_tensor(values) if dtype is None else tf.cast(values, dtype)
    if values.shape.rank == 0:
        return original(values, sample_weight, mask, reduction, dtype) / replicas
    total = original(values, sample_weight, mask, "sum", dtype)
    by_weight = reduction == "mean_with_sample_weight" and sample_weight is not None
    if mask is None and not by_weight:
        return total / tf.cast(tf.size(values) * replicas, total.dtype)
    counts = original(tf.ones_like(values), sample_weight if by_weight else None, mask, "sum", dtype)
    # Keras sums weights and masks in their own shape, which values may have an axis more than.
    sizes = [tf.size(one) for one in (mask, sample_weight if by_weight else None) if one is not None]
    repeats = tf.size(values) // tf.reduce_max(tf.stack(sizes)) if by_weight else 1
    (counts,) = all_reduce_sum([tf.stop_gradient(counts)])
    if not by_weight:
        # Keras 3.12 adds its epsilon to the count of a mask: the mean of one value of 1 tells.
        one = tf.ones((1,), total.dtype)
        counts += original(one, None, None, reduction, dtype) / original(one, None, one, reduction, dtype) - 1.0
    return tf.math.divide_no_nan(total, counts / tf.cast(repeats, counts.dtype))
