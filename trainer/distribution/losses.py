"""Reduces a Keras loss over the rows of all replicas and passes, as one device would over the global batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from trainer.distribution.gradients import all_reduce_sum
from trainer.distribution.step import running_step

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_BY_WEIGHT = "mean_with_sample_weight"

# Gives the number of values that count in the global batch, for that of the rows at hand.
_total: ContextVar[Callable[[Any], Any]] = ContextVar("total", default=lambda own: all_reduce_sum([own])[0])


def parts_of_batch() -> int:
    """Returns how many parts the global batch has, of which each pass of each replica takes one."""
    if step := running_step():
        return step.global_batch_size // step.rows
    replica = tf.distribute.get_replica_context()
    return replica.num_replicas_in_sync if replica else 1


@contextmanager
def counts_found() -> Iterator[list[Any]]:
    """Yields the counts by which losses in the block divide, of the rows at hand alone, in their order."""
    found: list[Any] = []

    def keep(own: Any) -> Any:
        found.append(own)
        return own

    token = _total.set(keep)
    try:
        yield found
    finally:
        _total.reset(token)


@contextmanager
def counts_given(counts: Sequence[Any]) -> Iterator[None]:
    """Makes losses in the block divide by these counts, in their order; by those of this pass if there are none."""
    if not counts:
        yield
        return
    left = iter(counts)
    token = _total.set(lambda own: next(left))
    try:
        yield
    finally:
        _total.reset(token)


def try_losses(model: keras.Model, rows: Any) -> None:
    """Computes the losses of a compiled model in training, on `rows` as fit has them; changes nothing."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(rows)
    held = [(one, tf.convert_to_tensor(one)) for one in model.trainable_variables]  # which regularizers ask for
    with keras.StatelessScope(held, collect_losses=True):
        model.compute_loss(x=x, y=y, y_pred=model(x, training=True), sample_weight=weight)


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
    counts as a mean over the replica's rows. All replicas must have the same number of rows. The same holds for passes.
    """
    parts = parts_of_batch()
    if parts == 1 or reduction not in _MEANS:
        return original(values, sample_weight, mask, reduction, dtype)
    values = tf.convert_to_tensor(values) if dtype is None else tf.cast(values, dtype)
    if values.shape.rank == 0:
        return original(values, sample_weight, mask, reduction, dtype) / parts
    total = original(values, sample_weight, mask, "sum", dtype)
    by_weight = reduction == _BY_WEIGHT and sample_weight is not None
    if mask is None and not by_weight:
        return total / tf.cast(tf.size(values) * parts, total.dtype)
    counts = original(tf.ones_like(values), sample_weight if by_weight else None, mask, "sum", dtype)
    # Keras sums weights and masks in their own shape, which values may have an axis more than.
    sizes = [tf.size(one) for one in (mask, sample_weight if by_weight else None) if one is not None]
    repeats = tf.size(values) // tf.reduce_max(tf.stack(sizes)) if by_weight else 1
    counts = _total.get()(tf.stop_gradient(counts))
    if not by_weight:
        # Keras 3.12 adds its epsilon to the count of a mask: the mean of one value of 1 tells.
        one = tf.ones((1,), total.dtype)
        counts += original(one, None, None, reduction, dtype) / original(one, None, one, reduction, dtype) - 1.0
    return tf.math.divide_no_nan(total, counts / tf.cast(repeats, counts.dtype))
