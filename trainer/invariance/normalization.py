"""Normalises groups of rows in training, in one of two ways: TensorFlow's fused kernel, or a formula over replicas.

The kernel takes images of one replica, in fewer passes over memory than a composition of operations. The formula takes
everything: the rows of all replicas, masks, any shape and axis, 64 bits.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

_SUM = tf.distribute.ReduceOp.SUM


class GroupedRows(NamedTuple):
    """Holds inputs of a layer: `groups` times as many rows, one group after the other."""

    values: Any
    groups: int = 1


class Normalized(NamedTuple):
    """Holds the outputs for each `GroupedRows`, and each group's mean and variance by channel, (groups, channels)."""

    outputs: list[Any]
    means: Any
    variances: Any


def normalized(layer: Any, parts: Sequence[GroupedRows], mask: Any = None) -> Normalized:
    """Normalises each group of `parts` by its own statistics, over all replicas if `layer` is synchronized.

    `mask`: which positions count, in the shape of the inputs without channels; only for one part.
    """
    replica = tf.distribute.get_replica_context() if layer.synchronized else None
    alone = replica is None or replica.num_replicas_in_sync == 1
    if alone and mask is None and all(_fits_kernel(layer, part) for part in parts):
        return _by_kernel(layer, parts)
    return _by_formula(layer, parts, mask, None if alone else replica)


def _scale_and_offset(layer: Any, channels: int, dtype: Any) -> tuple[Any, Any]:
    """Returns gamma and beta of the layer, (channels,)."""
    gamma = tf.cast(layer.gamma, dtype) if layer.scale else tf.ones(channels, dtype)
    return gamma, tf.cast(layer.beta, dtype) if layer.center else tf.zeros(channels, dtype)


def _fits_kernel(layer: Any, part: GroupedRows) -> bool:
    """Returns whether the kernel can normalise a part.

    It takes images in up to 32 bits, and gives the unbiased variance, which is not defined for one value.
    """
    values = part.values
    images = len(values.shape) == 4 and layer.axis in (-1, 3) and values.dtype != tf.float64
    return images and math.prod(size or 0 for size in values.shape[:-1]) != part.groups


def _by_kernel(layer: Any, parts: Sequence[GroupedRows]) -> Normalized:
    """Normalises images over one replica's rows by TensorFlow's kernel, once a group."""
    scale, offset = _scale_and_offset(layer, parts[0].values.shape[-1], tf.float32)
    outputs, means, variances = [], [], []
    for values, groups in parts:
        normalized_groups = [
            tf.raw_ops.FusedBatchNormV3(
                x=group, scale=scale, offset=offset, mean=[], variance=[], epsilon=layer.epsilon, is_training=True
            )
            for group in (tf.split(values, groups) if groups > 1 else [values])
        ]
        images = [group.y for group in normalized_groups]
        outputs.append(tf.concat(images, 0) if groups > 1 else images[0])
        means += [group.batch_mean for group in normalized_groups]
        variances += [_biased(group.batch_variance, values, groups) for group in normalized_groups]
    return Normalized(outputs, _stacked(means), _stacked(variances))


def _biased(variance: Any, values: Any, groups: int) -> Any:
    """Returns the mean of squares about the mean, of the variance that the kernel gives; 0 for one value."""
    *sizes, _ = keras.ops.shape(values)
    count = math.prod(sizes) // groups
    if isinstance(count, int):
        return variance * ((count - 1.0) / count)
    count = tf.cast(count, tf.float32)
    return tf.where(count > 1.0, variance * ((count - 1.0) / count), 0.0)


def _stacked(statistics: Sequence[Any]) -> Any:
    return tf.stack(statistics) if len(statistics) > 1 else tf.expand_dims(statistics[0], 0)


def _by_formula(layer: Any, parts: Sequence[GroupedRows], mask: Any, replica: Any | None) -> Normalized:
    """Normalises over the rows of all replicas, which have the same number of rows, with one all-reduce each way.

    Computes in at least float32, as Keras does. `replica`: the context of this one; None if there are no others.
    """
    shape, dtype = parts[0].values.shape, keras.backend.result_type(parts[0].values.dtype, "float32")
    gamma, beta = _scale_and_offset(layer, shape[layer.axis], dtype)
    inputs = [_by_group(tf.cast(part.values, dtype), part.groups) for part in parts]
    if mask is not None:
        mask = tf.broadcast_to(_by_group(tf.cast(mask, tf.bool), parts[0].groups)[..., None], tf.shape(inputs[0]))
    formula = _Formula(layer.axis % len(shape) + 1, layer.epsilon, mask, replica)
    statistics = formula.over_replicas(tf.concat([formula.moments(values) for values in inputs], 1))
    sizes, of_parts = [part.groups for part in parts], [statistics]
    if len(parts) > 1:
        of_parts = [*zip(*(tf.split(statistic, sizes) for statistic in statistics), strict=True)]
    outputs = [formula.outputs(*pair, gamma, beta) for pair in zip(inputs, of_parts, strict=True)]
    return Normalized([tf.cast(_joined(values), layer.compute_dtype) for values in outputs], *statistics[1:])


class _Formula(NamedTuple):
    """Normalises (groups, rows, …), with channels at `axis`, in operations of TensorFlow."""

    axis: int
    epsilon: float
    mask: Any | None  # which of the values count, in their shape
    replica: Any | None  # the context of this one, if the rows of several belong together

    def _axes(self, values: Any) -> list[int]:
        return [axis for axis in range(1, len(values.shape)) if axis != self.axis]

    def _beside(self, statistic: Any, values: Any) -> Any:
        """Returns (groups, channels) or (channels,) in a shape that broadcasts with `values`."""
        shape = [1] * len(values.shape)
        shape[0], shape[self.axis] = -1, values.shape[self.axis]
        return tf.reshape(statistic, shape)

    @property
    def _count_epsilon(self) -> float:
        """Returns what Keras adds to the count of a mask."""
        return 0.0 if self.mask is None else keras.config.epsilon()

    def moments(self, values: Any) -> Any:
        """Returns each group's and channel's count, mean and variance on this replica: (3, groups, channels)."""
        axes = self._axes(values)
        if self.mask is None:
            mean, variance = tf.nn.moments(values, axes)
            sizes = keras.ops.shape(values)
            count = tf.fill(mean.shape, tf.cast(math.prod(sizes[axis] for axis in axes), values.dtype))
            return tf.stack([count, mean, variance])
        count = tf.reduce_sum(tf.cast(self.mask, values.dtype), axes)
        mean = tf.math.divide_no_nan(tf.reduce_sum(tf.where(self.mask, values, 0.0), axes), count)
        squares = tf.square(tf.where(self.mask, values - self._beside(mean, values), 0.0))
        return tf.stack([count, mean, tf.math.divide_no_nan(tf.reduce_sum(squares, axes), count)])

    def over_replicas(self, moments: Any) -> tuple[Any, Any, Any]:
        """Returns counts, means and variances over all replicas, (groups, channels), of those of this one.

        The variance of each replica is taken about its mean, and both are combined by Chan et al. 1979,
        http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf: a difference of means of squares would
        lose the variance of channels whose mean is far from 0.
        """
        if self.replica is None and self.mask is None:
            return tuple(tf.unstack(moments))
        gathered = moments[None]  # (replicas, 3, groups, channels)
        if self.replica is not None:
            replicas = self.replica.num_replicas_in_sync
            place = tf.one_hot(self.replica.replica_id_in_sync_group, replicas, dtype=moments.dtype)
            gathered = self.replica.all_reduce(_SUM, tf.reshape(place, (-1, 1, 1, 1)) * moments)
        counts, means, variances = tf.unstack(gathered, axis=1)
        count = tf.reduce_sum(counts, 0) + self._count_epsilon
        shares = counts / count
        mean = tf.reduce_sum(shares * means, 0)
        return count, mean, tf.reduce_sum(shares * (variances + tf.square(means - mean)), 0)

    def outputs(self, values: Any, statistics: tuple[Any, Any, Any], gamma: Any, beta: Any) -> Any:
        """Returns the outputs. statistics: count, mean and variance, (groups, channels); gamma, beta: (channels,)."""

        def scaled(values: Any, count: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
            factor = tf.math.rsqrt(variance + self.epsilon) * gamma
            outputs = (values - self._beside(mean, values)) * self._beside(factor, values) + self._beside(beta, values)
            return outputs, lambda upstream: self._gradients(upstream, values, count, mean, variance, gamma)

        return tf.custom_gradient(scaled)(values, *statistics, gamma, beta)

    def _gradients(self, upstream: Any, values: Any, count: Any, mean: Any, variance: Any, gamma: Any) -> Any:
        """Returns the gradients by the parameters of `outputs`, of a loss that is summed over replicas.

        That by `values` holds what flows through count, mean and variance, which therefore have none: two numbers a
        channel are summed over all rows, where the chain rule through each operation sums a dozen.
        """
        factor = tf.math.rsqrt(variance + self.epsilon)
        normal = (values - self._beside(mean, values)) * self._beside(factor, values)
        axes = self._axes(values)
        sums = tf.stack([tf.reduce_sum(upstream, axes), tf.reduce_sum(upstream * normal, axes)])
        by_beta, by_gamma = tf.unstack(tf.reduce_sum(sums, 1))
        offset, slope = tf.unstack((sums if self.replica is None else self.replica.all_reduce(_SUM, sums)) / count)
        if self.mask is None:
            offset = self._beside(offset, values)
        else:  # deviations from the mean add up to epsilon times the mean
            offset = self._beside(offset - self._count_epsilon * mean * factor * slope / count, values)
            offset, normal = (tf.where(self.mask, moved, 0.0) for moved in (offset, normal))
        centred = upstream - offset - normal * self._beside(slope, values)
        return centred * self._beside(factor * gamma, values), None, None, None, by_gamma, by_beta


def _by_group(values: Any, groups: int) -> Any:
    """Returns (groups, rows, …) of (groups x rows, …)."""
    sizes = keras.ops.shape(values)
    return tf.reshape(values, (groups, sizes[0] // groups, *sizes[1:]))


def _joined(values: Any) -> Any:
    """Returns (groups x rows, …) of (groups, rows, …)."""
    groups, rows, *sizes = keras.ops.shape(values)
    return tf.reshape(values, (groups * rows, *sizes))
