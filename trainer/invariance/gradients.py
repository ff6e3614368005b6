"""Sums gradients over replicas before the optimizer applies them, so that every replica makes the same update."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.invariance.compat import disable_gradient_sum


class Update(NamedTuple):
    """Holds an update that an optimizer has not made yet."""

    apply: Callable[..., None]
    gradients: list[Any]
    variables: Sequence[Any] | None


_pending: ContextVar[list[Update] | None] = ContextVar("pending_updates", default=None)

# Settings by which Keras's optimizers branch in an update, where a replica cannot wait for the others.
_ONE_REPLICA_ONLY = {
    "gradient_accumulation_steps": "leave it out and use --micro_batches, or a larger --global_batch_size",
    "ema_overwrite_frequency": "leave it out: with use_ema the exported model has the averages",
}


@contextmanager
def postponed_updates() -> Iterator[list[Update]]:
    """Makes optimizers of `sum_first` postpone their updates in the block, in this thread; yields the list of them."""
    updates: list[Update] = []
    token = _pending.set(updates)
    try:
        yield updates
    finally:
        _pending.reset(token)


def sum_and_build(optimizer: Any, variables: Sequence[Any], precision: str) -> Any:
    """Returns `optimizer`, built on `variables` and summing over replicas first; with loss scaling for mixed_float16.

    Call it under the strategy's scope: an optimizer that is built later fails under MirroredStrategy. The loss must be
    divided by the global batch.
    """
    if precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(variables)
    return sum_first(optimizer)


def sum_first(optimizer: Any, *, mean: bool = False) -> Any:
    """Makes `optimizer.apply` sum gradients over replicas before LossScaleOptimizer checks them for overflow.

    Keras sums after each replica has checked its own gradients: one replica could skip an update that another makes, or
    all could apply a sum that overflowed. `mean`: takes the mean over replicas instead of the sum. Call it under the
    strategy's scope. Raises UserError for settings that several replicas cannot follow.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    for setting, advice in _ONE_REPLICA_ONLY.items():
        if replicas > 1 and (value := getattr(inner, setting)):
            raise UserError(
                f"{setting}={value}: {type(inner).__name__} cannot do this on {replicas} replicas: {advice}"
            )
    for part in (inner, *getattr(inner, "optimizers", ())):  # those of a MultiOptimizer
        disable_gradient_sum(part)
    apply = optimizer.apply

    def apply_sum(gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> None:
        if (pending := _pending.get()) is not None:
            pending.append(Update(apply_sum, list(gradients), variables))
            return
        summed = [_with_unique_rows(gradient) for gradient in all_reduce_sum(gradients)]
        apply([divided(gradient, replicas) for gradient in summed] if mean else summed, variables)

    apply_sum.sums_first = True  # type: ignore[attr-defined]
    optimizer.apply = apply_sum
    return optimizer


def _with_unique_rows(gradient: Any) -> Any:
    """Returns the gradient of an embedding with one slice for each of its rows; any other gradient unchanged.

    Several replicas bring a slice each for the same row. Keras's Adam squares slices one by one, and the sum of their
    squares would depend on the number of replicas.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def sums_first(optimizer: Any) -> bool:
    """Returns whether `sum_first` was called for this optimizer."""
    return hasattr(optimizer.apply, "sums_first")


def divided(gradient: Any, divisor: float) -> Any:
    """Divides a gradient; None stays None."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient / divisor


def all_reduce_sum(tensors: Sequence[Any]) -> list[Any]:
    """Returns each tensor summed over all replicas, None as None; with one replica, the tensors themselves.

    The gradient of such a sum is summed over replicas too. Call it in a replica, not while a model is built.
    """
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return list(tensors)
    present = [tensor for tensor in tensors if tensor is not None]
    summed = iter(replica.all_reduce(tf.distribute.ReduceOp.SUM, present))
    return [None if tensor is None else next(summed) for tensor in tensors]
