"""Sums gradients over replicas, then lets the optimizer apply the sum: the same update on every replica."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def sum_and_build(optimizer: Any, variables: Sequence[Any], precision: str) -> Any:
    """`optimizer`, built on `variables`, summing over replicas first; with loss scaling for mixed_float16.

    Call it under the strategy's scope: an optimizer that is built later dies under MirroredStrategy. The loss whose
    gradients it gets must be divided by the global batch.
    """
    if precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(variables)
    return sum_first(optimizer)


def sum_first(optimizer: Any) -> Any:
    """Makes `optimizer.apply` sum gradients over replicas before anything else looks at them.

    Keras sums inside, after LossScaleOptimizer has looked for overflow in one replica's own gradients: one replica
    could skip an update that another takes, or all take a broken one.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    assert hasattr(inner, "_all_reduce_sum_gradients"), "this Keras would sum gradients twice"
    inner._all_reduce_sum_gradients = list  # nothing is left to sum there
    apply = optimizer.apply

    def apply_sum(gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> None:
        apply(all_reduce_sum(gradients), variables)

    optimizer.apply = apply_sum
    return optimizer


def all_reduce_sum(tensors: Sequence[Any]) -> list[Any]:
    """Each tensor (None stays None) summed over all replicas; the tensors themselves where there is one replica."""
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return list(tensors)
    there = [tensor for tensor in tensors if tensor is not None]
    summed = iter(replica.all_reduce(tf.distribute.ReduceOp.SUM, there))
    return [None if tensor is None else next(summed) for tensor in tensors]
