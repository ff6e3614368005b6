"""Sums gradients over replicas before the optimizer applies them, so that every replica makes the same update."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.invariance.compat import disable_gradient_sum
from trainer.invariance.fused_updates import fuse_updates
from trainer.invariance.step import dense, running_step


class Update(NamedTuple):
    """Holds an update that an optimizer has not made yet."""

    apply: Callable[..., None]
    gradients: list[Any]
    variables: Sequence[Any] | None


_row_factors = [1.0]  # of `with_tables_as_of`, in the threads of all replicas
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
    begin, apply = fuse_updates(inner), optimizer.apply

    def apply_sum(gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> None:
        if (pending := _pending.get()) is not None:
            pending.append(Update(apply_sum, list(gradients), variables))
            return
        summed = _summed(gradients)
        begin()
        apply([divided(gradient, replicas) for gradient in summed] if mean else summed, variables)

    apply_sum.sums_first = True  # type: ignore[attr-defined]
    optimizer.apply = apply_sum
    return optimizer


def _summed(gradients: Sequence[Any]) -> list[Any]:
    """Returns the gradients summed over replicas, those of embeddings as large as their tables; None stays None.

    An embedding's gradient has a slice for each row of the batch, and several for a row of its table. Adam would square
    each. `tf.unique`, and TensorFlow's sum of slices, make the host wait for a GPU. Of a large table only the slices
    travel: all replicas have the same number.
    """
    placed = [_placed(gradient) if _is_large(gradient) else (None, None) for gradient in gradients]
    values = [
        dense(gradient) if rows is None else slices for gradient, (slices, rows) in zip(gradients, placed, strict=True)
    ]
    summed, rows = all_reduce_sum(values), all_reduce_sum([rows for _, rows in placed])
    parts = zip(summed, rows, gradients, strict=True)
    return [value if at is None else dense(tf.IndexedSlices(value, at, like.dense_shape)) for value, at, like in parts]


@contextmanager
def with_tables_as_of(times: float) -> Iterator[None]:
    """Makes gradients of tables in the block travel as they do in steps of so many times the rows: for plans."""
    _row_factors.append(times)
    try:
        yield
    finally:
        _row_factors.pop()


def _is_large(gradient: Any) -> bool:
    """Returns whether a table has more than twice as many rows as all replicas have slices, whose number is known."""
    if not isinstance(gradient, tf.IndexedSlices) or (size := tf.get_static_value(gradient.dense_shape)) is None:
        return False
    replicas, count = tf.distribute.get_replica_context().num_replicas_in_sync, gradient.values.shape[0]
    return replicas > 1 and count is not None and bool(size[0] > 2 * replicas * count * _row_factors[-1])


def _placed(gradient: tf.IndexedSlices) -> tuple[Any, Any]:
    """Returns this replica's slices and their rows, (replicas x slices, …): at its place, and 0 elsewhere."""
    replica = tf.distribute.get_replica_context()
    place = tf.one_hot(replica.replica_id_in_sync_group, replica.num_replicas_in_sync, dtype=tf.int64)
    rows = tf.reshape(place[:, None] * tf.cast(gradient.indices, tf.int64), (-1,))
    place = tf.reshape(tf.cast(place, gradient.values.dtype), (-1, *[1] * len(gradient.values.shape)))
    return tf.reshape(place * gradient.values, (-1, *gradient.values.shape[1:])), rows


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

    The gradient of such a sum is summed over replicas too. Call it in a replica, not while a model is built. With
    --virtual_replicas it adds in their tree; raises UserError in a pass, which knows one of them alone.
    """
    if (step := running_step()) and step.virtual_replicas:
        if step.parts > 1:
            raise UserError(
                f"{step.split}: the step sums over replicas within a pass, whose rows are those of one of them: drop "
                "--virtual_replicas, or use a loss that is a mean over rows"
            )
        return step.add_over_replicas(tensors)
    replica = tf.distribute.get_replica_context()
    summed = list(tensors)
    if replica.num_replicas_in_sync == 1:
        return summed
    kinds = [None if tensor is None else tensor.dtype for tensor in tensors]
    for kind in filter(None, dict.fromkeys(kinds)):  # TensorFlow joins what it sums, and joins one type alone
        places = [place for place, of_it in enumerate(kinds) if of_it == kind]
        sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, [tensors[place] for place in places])
        for place, total in zip(places, sums, strict=True):
            summed[place] = total
    return summed
