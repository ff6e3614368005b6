"""Sums gradients over replicas, then updates weights: the same update on every replica."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def apply_gradients(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Sums `gradients` over replicas and lets a prepared `optimizer` (see `prepare`) apply the sum once.

    Called in replica context. The loss must already be divided by the global batch.
    """
    optimizer.apply(all_reduce_sum(gradients), variables)


def all_reduce_sum(tensors: Sequence[Any]) -> list[Any]:
    """Each tensor summed over all replicas; the tensors themselves where there is one replica."""
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return list(tensors)
    return list(replica.all_reduce(tf.distribute.ReduceOp.SUM, list(tensors)))


def prepare(optimizer: Any, variables: Sequence[Any], precision: str) -> Any:
    """`optimizer`, built on `variables` and ready for `apply_gradients`; wrapped in loss scaling for mixed_float16.

    Call it under the strategy's scope: an optimizer that is built later dies under MirroredStrategy.

    Keras sums gradients inside `optimizer.apply`. With loss scaling that is too late: LossScaleOptimizer looks for
    overflow in the gradients it is given, so one replica could skip an update that another takes. Here gradients come
    in already summed, and the optimizer's own sum is left out.
    """
    optimizer._all_reduce_sum_gradients = list
    if precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(variables)
    return optimizer
