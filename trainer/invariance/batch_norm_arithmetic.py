"""Computes batch norm's moments, outputs and gradients for rows of one replica, in one of two ways.

TensorFlow's fused kernel takes images in up to 32 bits, in few passes over memory. The formula takes everything: masks,
any shape and axis, 64 bits. Both have the same methods, whose statistics are of channels: (channels,).
"""

import math
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf


def fits_kernel(layer: Any, values: Any, groups: int) -> bool:
    """Returns whether the kernel can normalise: its unbiased variance is not defined for one value a group."""
    images = len(values.shape) == 4 and layer.axis in (-1, 3) and values.dtype != tf.float64
    return images and math.prod(size or 0 for size in values.shape[:-1]) != groups


@dataclass(frozen=True)
class Formula:
    """Normalises values, (rows, …), with channels at `axis`, in operations of TensorFlow."""

    epsilon: float
    axis: int = 3
    mask: Any = None  # which of the values count, in a shape that broadcasts with them
    dtype: Any = tf.float32

    def _beside(self, statistic: Any, values: Any) -> Any:
        """Returns (channels,) in a shape that broadcasts with `values`."""
        return tf.reshape(statistic, [-1 if axis == self.axis else 1 for axis in range(len(values.shape))])

    def _sum(self, values: Any) -> Any:
        return tf.reduce_sum(values, [axis for axis in range(len(values.shape)) if axis != self.axis])

    def count(self, values: Any) -> Any:
        """Returns the number of values of a channel: an int if it is known, else a tensor."""
        count = math.prod(size for axis, size in enumerate(keras.ops.shape(values)) if axis != self.axis)
        return count if isinstance(count, int) else tf.cast(count, self.dtype)

    def moments(self, values: Any) -> list[Any]:
        """Returns mean and variance, and the count if a mask decides it."""
        if self.mask is None:
            return list(tf.nn.moments(values, [axis for axis in range(len(values.shape)) if axis != self.axis]))
        count = self._sum(tf.broadcast_to(tf.cast(self.mask, self.dtype), tf.shape(values)))
        mean = tf.math.divide_no_nan(self._sum(tf.where(self.mask, values, 0.0)), count)
        squares = tf.square(tf.where(self.mask, values - self._beside(mean, values), 0.0))
        return [mean, tf.math.divide_no_nan(self._sum(squares), count), count]

    def normalized(self, values: Any, mean: Any, variance: Any, scale: Any, offset: Any) -> Any:
        """Returns scale * (values - mean) / sqrt(variance + epsilon) + offset."""
        factor = self._beside(tf.math.rsqrt(variance + self.epsilon) * scale, values)
        return (values - self._beside(mean, values)) * factor + self._beside(offset, values)

    def gradients(self, upstream: Any, values: Any, mean: Any, variance: Any, gamma: Any) -> tuple[Any, list[Any]]:
        """Returns the gradient by values for constant statistics, and two sums for each channel.

        The sums are the gradients by gamma and beta: of upstream times the normalised values, and of upstream.
        """
        factor = tf.math.rsqrt(variance + self.epsilon)
        slope = self._sum(upstream * (values - self._beside(mean, values))) * factor
        return upstream * self._beside(gamma * factor, values), [slope, self._sum(upstream)]


@dataclass(frozen=True)
class Kernel:
    """Normalises images, (rows, height, width, channels), by TensorFlow's kernel, whose statistics are float32."""

    epsilon: float
    mask: None = None
    dtype: Any = tf.float32

    def count(self, values: Any) -> Any:
        """Returns the number of values of a channel: an int if it is known, else a tensor."""
        return Formula(self.epsilon).count(values)

    def training(self, values: Any, gamma: Any, beta: Any) -> tuple[Any, Any, Any]:
        """Returns outputs by the mean and the variance of `values`, and these: all that one replica needs."""
        normalized = self._forward(values, gamma, beta)
        return normalized.y, normalized.batch_mean, self._biased(normalized.batch_variance, self.count(values))

    def _forward(self, values: Any, scale: Any, offset: Any, *statistics: Any) -> Any:
        mean, variance = statistics or ([], [])
        return tf.raw_ops.FusedBatchNormV3(
            x=values, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=self.epsilon,
            is_training=not statistics,
        )  # fmt: skip

    def _biased(self, variance: Any, count: Any) -> Any:
        """Returns the mean of squares about the mean, of the variance that the kernel gives; 0 for one value."""
        if isinstance(count, int):
            return variance * ((count - 1.0) / count)
        return tf.where(count > 1.0, variance * ((count - 1.0) / count), 0.0)

    def moments(self, values: Any) -> list[Any]:
        """Returns mean and variance."""
        nothing = tf.zeros(values.shape[-1])
        return list(self.training(values, nothing, nothing)[1:])

    def normalized(self, values: Any, mean: Any, variance: Any, scale: Any, offset: Any) -> Any:
        """Returns scale * (values - mean) / sqrt(variance + epsilon) + offset."""
        return self._forward(values, scale, offset, mean, variance).y

    def gradients(self, upstream: Any, values: Any, mean: Any, variance: Any, gamma: Any) -> tuple[Any, list[Any]]:
        """Returns what `Formula.gradients` returns."""
        gradients = tf.raw_ops.FusedBatchNormGradV3(
            y_backprop=upstream, x=values, scale=gamma, reserve_space_1=mean, reserve_space_2=variance,
            reserve_space_3=tf.zeros(0), epsilon=self.epsilon, is_training=False,
        )  # fmt: skip
        return gradients.x_backprop, [gradients.scale_backprop, gradients.offset_backprop]
