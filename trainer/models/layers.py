"""Layers whose randomness belongs to the step, and what several models share."""

import math
from typing import Any

import keras
import tensorflow as tf

from trainer.config.train_config import TrainConfig
from trainer.distribution.step import current_step


class StepDropout(keras.layers.Layer):
    """Dropout whose mask is a function of (seed, step, global row): the same on any number of replicas.

    A saved template holds Keras's own Dropout in its place (`plain`): at inference both do nothing.
    """

    def __init__(self, rate: float, *, per_example: bool = False, **kwargs: Any) -> None:
        """`per_example` drops whole examples (stochastic depth) instead of single values."""
        super().__init__(**kwargs)
        self.rate, self.per_example = rate, per_example

    def call(self, inputs: Any, training: bool = False) -> Any:
        """(rows, …) -> the same shape, kept values scaled by 1 / (1 - rate)."""
        if not training or not self.rate:
            return inputs
        shape = [1] * (len(inputs.shape) - 1) if self.per_example else inputs.shape[1:]
        drawn = current_step().uniform(shape, stream=f"dropout/{self.name}")
        kept = tf.cast(drawn >= self.rate, inputs.dtype)
        return inputs * kept / tf.cast(1.0 - self.rate, inputs.dtype)

    def plain(self) -> keras.layers.Layer:
        """The layer that a template holds instead."""
        return keras.layers.Dropout(self.rate, name=self.name)  # which does nothing at inference

    def get_config(self) -> dict[str, Any]:
        """As Keras asks."""
        return {**super().get_config(), "rate": self.rate, "per_example": self.per_example}


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch norm over the rows of all replicas, with one all-reduce a pass where Keras's own makes three."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "synchronized": True})

    def _moments(self, inputs: Any, mask: Any) -> Any:
        """Mean and variance of each channel, (channels,)."""
        replica = tf.distribute.get_replica_context()
        if mask is not None or replica is None:
            return super()._moments(inputs, mask)
        sums = tf.stack([tf.reduce_sum(values, self._reduction_axes) for values in (inputs, tf.square(inputs))])
        count = math.prod(inputs.shape[axis] for axis in self._reduction_axes) * replica.num_replicas_in_sync
        mean, square = tf.unstack(replica.all_reduce(tf.distribute.ReduceOp.SUM, sums) / count)
        return mean, tf.maximum(square - tf.square(mean), 0.0)

    def plain(self) -> keras.layers.Layer:
        """The layer that a template holds instead."""
        return keras.layers.BatchNormalization.from_config({**self.get_config(), "synchronized": False})


class FusedBatchNormalization(keras.layers.BatchNormalization):
    """Batch norm over one replica's rows in one kernel each way; Keras 3 makes some ten passes over memory.

    For images only: (rows, height, width, channels).
    """

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """As Keras's own, up to rounding; in float64, for which there is no such kernel, it is Keras's own."""
        if not (training and self.trainable) or mask is not None or inputs.dtype == tf.float64:
            return super().call(inputs, training=training, mask=mask)
        scale, offset = (tf.cast(weight, tf.float32) for weight in (self.gamma, self.beta))
        outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs, scale=scale, offset=offset, mean=[], variance=[], epsilon=self.epsilon, is_training=True
        )
        count = tf.cast(tf.size(inputs) // inputs.shape[-1], tf.float32)
        variance *= (count - 1.0) / count  # of these rows, where the kernel estimates that of all
        for average, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            average.assign(average * self.momentum + value * (1.0 - self.momentum))
        return outputs

    def plain(self) -> keras.layers.Layer:
        """The layer that a template holds instead."""
        return keras.layers.BatchNormalization.from_config(self.get_config())


def synchronized(config: TrainConfig) -> bool:
    """Whether batch norm has replicas to span. Call it under the strategy's scope."""
    return config.sync_batch_norm and tf.distribute.get_strategy().num_replicas_in_sync > 1


def batch_norm(*, synchronized: bool) -> type[keras.layers.BatchNormalization]:
    """The layer of batch norm, for images: over the rows of all replicas, or of one."""
    return SyncBatchNormalization if synchronized else FusedBatchNormalization


def refresh_normalization(model: keras.Model) -> None:
    """Call it after weights were assigned: Keras's Normalization computes with what it made of them earlier."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def full_precision() -> str:
    """The type of weights: outputs and losses keep it where layers between compute in 16 bits."""
    return str(keras.config.dtype_policy().variable_dtype)
