"""Sums gradients over replicas before the optimizer applies them, so that every replica makes the same update."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer.compat import disable_gradient_sum


def sum_and_build(optimizer: Any, variables: Sequence[Any], precision: str) -> Any:
    """Returns `optimizer`, built on `variables` and summing over replicas first; with loss scaling for mixed_float16.

    Call it under the strategy's scope: an optimizer that is built later fails under MirroredStrategy. The loss must be
    divided by the global batch.
    """
    if precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(variables)
    return sum_first(optimizer)


def sum_first(optimizer: Any) -> Any:
    """Makes `optimizer.apply` sum gradients over replicas before LossScaleOptimizer checks them for overflow.

    Keras sums after that check of each replica's own gradients: one replica could skip an update that another makes, or
    all could apply a sum that overflowed.
    """
    disable_gradient_sum(getattr(optimizer, "inner_optimizer", optimizer))
    apply = optimizer.apply

    def apply_sum(gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> None:
        apply(all_reduce_sum(gradients), variables)

    optimizer.apply = apply_sum
    return optimizer


def all_reduce_sum(tensors: Sequence[Any]) -> list[Any]:
    """Returns each tensor summed over all replicas, None as None; with one replica, the tensors themselves."""
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return list(tensors)
    present = [tensor for tensor in tensors if tensor is not None]
    summed = iter(replica.all_reduce(tf.distribute.ReduceOp.SUM, present))
    return [None if tensor is None else next(summed) for tensor in tensors]
