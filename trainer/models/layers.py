"""Provides layers that give the same numbers on any number of replicas, and helpers that several models share."""

import math
from typing import Any

import keras
import tensorflow as tf

from trainer.compat import all_layers
from trainer.config.train_config import TrainConfig
from trainer.distribution.step import current_step


class StepDropout(keras.layers.Layer):
    """Drops values by a mask that is a function of (seed, step, global row): the same on any number of replicas.

    A saved template has Keras's own Dropout instead (`plain`): at inference neither does anything.
    """

    def __init__(self, rate: float, *, per_example: bool = False, **kwargs: Any) -> None:
        """Sets the share to drop; `per_example` drops whole examples (stochastic depth) instead of single values."""
        super().__init__(**kwargs)
        self.rate, self.per_example = rate, per_example

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the inputs, (rows, …), with the remaining values scaled by 1 / (1 - rate)."""
        if not training or not self.rate:
            return inputs
        shape = [1] * (len(inputs.shape) - 1) if self.per_example else inputs.shape[1:]
        drawn = current_step().uniform(shape, stream=f"dropout/{self.name}")
        kept = tf.cast(drawn >= self.rate, inputs.dtype)
        return inputs * kept / tf.cast(1.0 - self.rate, inputs.dtype)

    def plain(self) -> keras.layers.Layer:
        """Returns the layer that a template has instead."""
        return keras.layers.Dropout(self.rate, name=self.name)

    def get_config(self) -> dict[str, Any]:
        """Returns the settings from which Keras copies the layer."""
        return {**super().get_config(), "rate": self.rate, "per_example": self.per_example}


class _BatchNormalization(keras.layers.BatchNormalization):
    """Replaces the arithmetic of training by `normalize`, up to rounding; the rest is Keras's own layer."""

    def normalize(self, inputs: Any) -> tuple[Any, Any, Any] | None:
        """Returns the outputs, and each channel's mean and variance; None leaves them to Keras."""
        raise NotImplementedError

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Returns the normalised inputs and updates the moving statistics."""
        found = self.normalize(inputs) if training and self.trainable and mask is None else None
        if found is None:
            return super().call(inputs, training=training, mask=mask)
        for average, value in zip((self.moving_mean, self.moving_variance), found[1:], strict=True):
            average.assign(average * self.momentum + value * (1.0 - self.momentum))
        return found[0]

    def plain(self) -> keras.layers.Layer:
        """Returns the layer that a template has instead."""
        return keras.layers.BatchNormalization.from_config({**self.get_config(), "synchronized": False})


class SyncBatchNormalization(_BatchNormalization):
    """Normalises over the rows of all replicas, with one all-reduce per pass; Keras's own layer makes three."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "synchronized": True})

    def normalize(self, inputs: Any) -> tuple[Any, Any, Any] | None:
        """Computes in at least float32, as Keras does. All replicas must have the same number of rows."""
        replica = tf.distribute.get_replica_context()
        if replica is None:
            return None
        values = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        axes = [axis for axis in range(len(values.shape)) if axis != self.axis % len(values.shape)]
        sums = tf.stack([tf.reduce_sum(each, axes) for each in (values, tf.square(values))])
        count = math.prod(values.shape[axis] for axis in axes) * replica.num_replicas_in_sync
        mean, square = tf.unstack(replica.all_reduce(tf.distribute.ReduceOp.SUM, sums) / count)
        variance = tf.maximum(square - tf.square(mean), 0.0)
        offset, scale = self.beta if self.center else None, self.gamma if self.scale else None
        outputs = keras.ops.batch_normalization(values, mean, variance, self.axis, offset, scale, self.epsilon)
        return tf.cast(outputs, self.compute_dtype), mean, variance


class FusedBatchNormalization(_BatchNormalization):
    """Normalises over one replica's rows in one kernel each way; Keras 3 makes some ten passes over memory.

    For images only: (rows, height, width, channels).
    """

    def normalize(self, inputs: Any) -> tuple[Any, Any, Any] | None:
        """Computes with TensorFlow's kernel, which does not exist for float64."""
        if inputs.dtype == tf.float64:
            return None
        scale, offset = (tf.cast(weight, tf.float32) for weight in (self.gamma, self.beta))
        outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs, scale=scale, offset=offset, mean=[], variance=[], epsilon=self.epsilon, is_training=True
        )
        count = tf.cast(tf.size(inputs) // inputs.shape[-1], tf.float32)
        return outputs, mean, variance * ((count - 1.0) / count)  # the kernel's variance is the unbiased estimate


def synchronized(config: TrainConfig) -> bool:
    """Returns whether batch norm spans several replicas. Call it under the strategy's scope."""
    return config.sync_batch_norm and tf.distribute.get_strategy().num_replicas_in_sync > 1


def batch_norm(*, synchronized: bool) -> type[keras.layers.BatchNormalization]:
    """Returns the batch norm layer for images: over the rows of all replicas, or of one."""
    return SyncBatchNormalization if synchronized else FusedBatchNormalization


def refresh_normalization(model: keras.Model) -> None:
    """Makes Keras's Normalization layers use newly assigned weights: they compute with values derived earlier."""
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def full_precision() -> str:
    """Returns the type of weights, which outputs and losses keep where other layers compute in 16 bits."""
    return str(keras.config.dtype_policy().variable_dtype)
