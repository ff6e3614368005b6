"""Sums gradients over replicas before the optimizer applies them, so that every replica makes the same update."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from trainer.compat import branch_over_replicas, compiled_by_xla, disable_gradient_sum


class Update(NamedTuple):
    """Holds an update that an optimizer is to make."""

    apply: Callable[..., None]
    gradients: list[Any]
    variables: Sequence[Any] | None


_kept: ContextVar[list[Update] | None] = ContextVar("kept_updates", default=None)


@contextmanager
def kept_updates() -> Iterator[list[Update]]:
    """Yields the updates that optimizers of `sum_first` are asked for in the block, in this thread: none is made."""
    updates: list[Update] = []
    token = _kept.set(updates)
    try:
        yield updates
    finally:
        _kept.reset(token)


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

    Keras sums after that check of each replica's own gradients: one replica could skip an update that another makes, or
    all could apply a sum that overflowed. `mean`: takes the mean over replicas instead of the sum.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    disable_gradient_sum(inner)
    if inner.gradient_accumulation_steps or inner.ema_overwrite_frequency:
        branch_over_replicas(inner, _branch)
    apply = optimizer.apply

    def apply_sum(gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> None:
        if (kept := _kept.get()) is not None:
            kept.append(Update(apply_sum, list(gradients), variables))
            return
        summed = [_one_slice_a_row(each) for each in all_reduce_sum(gradients)]
        apply([_divided(each) for each in summed] if mean else summed, variables)

    apply_sum.sums_first = True  # type: ignore[attr-defined]
    optimizer.apply = apply_sum
    return optimizer


def _one_slice_a_row(gradient: Any) -> Any:
    """Returns the gradient of an embedding with the slices of each row of it summed; any other gradient unchanged.

    Keras's Adam squares the slices one by one: those of a position, which all rows of a batch share, come as one slice
    from each replica, and their squares would depend on the number of replicas.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def sums_first(optimizer: Any) -> bool:
    """Returns whether `sum_first` was called for this optimizer."""
    return hasattr(optimizer.apply, "sums_first")


def _divided(gradient: Any) -> Any:
    """Returns a gradient divided by the number of replicas; None as None."""
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / replicas, gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient / replicas


def _branch(cond: Any, pred: Any, true_fn: Any, false_fn: Any) -> Any:
    """Runs one of two functions without results on all replicas, where `pred` is the same on each.

    A replica cannot wait for the others inside a branch of its own, as updates of weights do: all take one together.
    """
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1 or compiled_by_xla():
        return cond(pred, true_fn, false_fn)

    def together(strategy: Any, pred: Any, true_fn: Any, false_fn: Any) -> None:
        def on_each(branch: Any) -> None:
            strategy.extended.call_for_each_replica(lambda one: [one(), None][1], args=(branch,))

        first = strategy.experimental_local_results(pred)[0]
        tf.cond(first, lambda: on_each(true_fn), lambda: on_each(false_fn))

    return replica.merge_call(together, args=(pred, true_fn, false_fn))


def all_reduce_sum(tensors: Sequence[Any]) -> list[Any]:
    """Returns each tensor summed over all replicas, None as None; with one replica, the tensors themselves."""
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return list(tensors)
    present = [tensor for tensor in tensors if tensor is not None]
    summed = iter(replica.all_reduce(tf.distribute.ReduceOp.SUM, present))
    return [None if tensor is None else next(summed) for tensor in tensors]
