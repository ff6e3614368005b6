"""Makes batch norm, in place of Keras's own code, span the rows of all replicas, or groups of rows, in few operations.

The moments of each replica's rows are combined by one all-reduce, and the sums of its gradients by another. What lies
between them is computed for the rows of one replica in one of two ways: TensorFlow's fused kernel takes images in up to
32 bits, in few passes over memory; the formula takes everything, masks, any shape and axis, 64 bits.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.invariance.gradients import all_reduce_sum
from trainer.invariance.internals import compiled_by_xla, wrap
from trainer.invariance.step import holding, running_step


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


class Kernel(Formula):
    """Normalises images, (rows, height, width, channels), by TensorFlow's kernel, whose statistics are float32."""

    def training(self, values: Any, gamma: Any, beta: Any) -> tuple[Any, Any, Any]:
        """Returns outputs by the mean and the variance of `values`, and these: all that one replica needs."""
        normalized, count = self._forward(values, gamma, beta), self.count(values)
        # The kernel's variance is unbiased: that of Keras is the mean of squares about the mean, 0 for one value.
        biased = normalized.batch_variance * ((count - 1.0) / count)
        variance = biased if isinstance(count, int) else tf.where(count > 1.0, biased, 0.0)
        return normalized.y, normalized.batch_mean, variance

    def _forward(self, values: Any, scale: Any, offset: Any, *statistics: Any) -> Any:
        mean, variance = statistics or ([], [])
        return tf.raw_ops.FusedBatchNormV3(
            x=values, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=self.epsilon,
            is_training=not statistics,
        )  # fmt: skip

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


_groups: ContextVar[int] = ContextVar("groups", default=1)


def separate_groups(count: int) -> AbstractContextManager[int]:
    """Makes batch norm within the block treat its inputs as `count` groups of equally many rows, in order.

    As in `count` calls, one a group. Only for layers of `normalize_in_place` that keep Keras's `call`.
    """
    return holding(_groups, count)


def normalize_in_place(layer: keras.layers.BatchNormalization, *, synchronized: bool) -> None:
    """Makes a batch norm layer normalise as described above in training, up to rounding as Keras.

    `synchronized`: over the rows of all replicas. A class of a user's with a `call` of its own keeps that.
    """
    layer.synchronized = layer.synchronized or synchronized
    of_keras = getattr(layer.call, "__func__", None) is keras.layers.BatchNormalization.call
    if not of_keras or getattr(layer, "renorm", False):
        return

    def call(original: Any, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Returns the normalised inputs and updates the moving statistics. mask: (rows, …) without channels."""
        if not training or not layer.trainable:
            return original(inputs, training=training, mask=mask)
        step = running_step()
        if step and step.virtual_replicas > 1 and step.micro_batch_count == 1:
            raise UserError(
                f"{step.split}: {layer.name} normalises rows outside of current_step().accumulate: call it in there, "
                "or drop --virtual_replicas"
            )
        alone = not layer.synchronized or (step and step.virtual_replicas)
        replica = None if alone else tf.distribute.get_replica_context()
        replicas = replica.num_replicas_in_sync if replica else 1
        groups = _groups.get()
        # XLA has no such kernel: it would compose it, with a variance that is a difference of means of squares. Of one
        # value a group the kernel's unbiased variance is not defined.
        images = len(inputs.shape) == 4 and layer.axis in (-1, 3) and inputs.dtype != tf.float64 and mask is None
        method: Formula = Kernel(layer.epsilon)
        if not images or compiled_by_xla() or math.prod(size or 0 for size in inputs.shape[:-1]) == groups:
            mask = None if mask is None else tf.cast(mask, tf.bool)[..., None]
            dtype = keras.backend.result_type(inputs.dtype, "float32")
            method = Formula(layer.epsilon, layer.axis % len(inputs.shape), mask, dtype)
            inputs = tf.cast(inputs, dtype)
        channels = inputs.shape[layer.axis]
        gamma = tf.cast(layer.gamma, method.dtype) if layer.scale else tf.ones(channels, method.dtype)
        beta = tf.cast(layer.beta, method.dtype) if layer.center else tf.zeros(channels, method.dtype)
        parts = tf.split(inputs, groups) if groups > 1 else [inputs]
        # Each group's mean and variance by channel: (groups, channels).
        if replicas == 1 and isinstance(method, Kernel):
            outputs, *statistics = zip(*(method.training(part, gamma, beta) for part in parts), strict=True)
            means, variances = map(_stacked, statistics)
        else:
            outputs, means, variances = _over_replicas(method, replicas, gamma, beta, parts)
        # The averages move as one update for each group, in order, would. After n groups,
        # average <- m^n average + sum over i of (1 - m) m^(n - 1 - i) value_i.
        momentum = layer.momentum
        weights = (1.0 - momentum) * momentum ** np.arange(groups - 1.0, -1.0, -1.0)

        def update(statistics: Sequence[Any]) -> None:
            for average, values in zip((layer.moving_mean, layer.moving_variance), statistics, strict=True):
                moved = values * tf.constant(weights[:, None], values.dtype)
                moved = tf.squeeze(moved, 0) if groups == 1 else tf.reduce_sum(moved, 0)
                average.assign(average * momentum**groups + moved)

        if step and step.micro_batch_count > 1:  # together they make one update: value_i is then their mean
            step.averaged.append((update, [means, variances]))
        else:
            update([means, variances])
        return tf.cast(tf.concat(outputs, 0) if groups > 1 else outputs[0], layer.compute_dtype)

    wrap("keras.layers.Layer.call", call, owner=layer)


def _over_replicas(
    method: Formula, replicas: int, gamma: Any, beta: Any, parts: Sequence[Any]
) -> tuple[tuple[Any, ...], Any, Any]:
    """Returns the outputs for each of `parts`, a group of rows, and means and variances over all replicas.

    gamma, beta: (channels,). The outputs have the gradient of a loss that is summed over replicas.
    """
    means, variances, count = _combined([method.moments(part) for part in parts], replicas)
    count = method.count(parts[0]) * replicas if count is None else count
    statistics = [*zip(_unstacked(means), _unstacked(variances), strict=True)]

    def first(gamma: Any, *tensors: Any) -> list[Any]:
        """Returns gradients by gamma, beta and parts: two sums a channel over all replicas, and what these move."""
        upstreams, parts = tensors[: len(statistics)], tensors[len(statistics) :]
        arguments = zip(upstreams, parts, statistics, strict=True)
        direct, sums = zip(*(method.gradients(x, part, *pair, gamma) for x, part, pair in arguments), strict=True)
        total = _stacked([tf.stack(pair) for pair in sums])  # (groups, 2, channels)
        if replicas > 1:
            (total,) = all_reduce_sum([total])
        factors = tf.math.rsqrt(variances + method.epsilon)
        slopes, offsets = tf.unstack(total * tf.expand_dims(gamma * factors / -count, 1), axis=1)
        if method.mask is not None:  # deviations from the mean add up to the mean times what Keras adds to the count
            offsets -= keras.config.epsilon() * means * factors * slopes / count
        lines = zip(_unstacked(slopes), _unstacked(offsets), strict=True)
        moved = [method.normalized(x, *pair, *line) for x, pair, line in zip(parts, statistics, lines, strict=True)]
        if method.mask is not None:
            moved = [tf.where(method.mask, shift, 0.0) for shift in moved]
        by_gamma, by_beta = map(tf.add_n, zip(*sums, strict=True))
        return [by_gamma, by_beta, *(part + shift for part, shift in zip(direct, moved, strict=True))]

    def with_second(gamma: Any, *tensors: Any) -> tuple[Any, Any]:
        """Returns the same; its own gradient is that of the formula, as the kernel's ignores the statistics' part."""

        def second(*upstreams: Any) -> Any:
            parts = tensors[len(statistics) :]
            with tf.GradientTape() as outer:
                outer.watch([gamma, *tensors])
                with tf.GradientTape() as inner:
                    inner.watch([gamma, beta, *parts])
                    outputs, *_ = _over_replicas(Formula(method.epsilon), replicas, gamma, beta, parts)
                gradients = inner.gradient(outputs, [gamma, beta, *parts], tensors[: len(statistics)])
            return outer.gradient(gradients, [gamma, *tensors], upstreams)

        return first(gamma, *tensors), second

    def normalized(gamma: Any, beta: Any, *parts: Any) -> tuple[Any, Any]:
        outputs = [method.normalized(x, *pair, gamma, beta) for x, pair in zip(parts, statistics, strict=True)]
        gradient = tf.custom_gradient(with_second) if isinstance(method, Kernel) else first
        return outputs, lambda *upstreams: gradient(gamma, *upstreams, *parts)

    return tuple(tf.custom_gradient(normalized)(gamma, beta, *parts)), means, variances


def _combined(moments: Sequence[Sequence[Any]], replicas: int) -> tuple[Any, Any, Any]:
    """Returns mean, variance and count over all replicas, (groups, channels), of those of this one's groups.

    moments: mean, variance and, where a mask decides it, the count of each group; a count of None is that of all rows.
    The variance of each replica is taken about its mean, and both are combined by Chan et al. 1979,
    http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf: a difference of means of squares would lose
    the variance of channels whose mean is far from 0.
    """
    gathered = tf.expand_dims(
        _stacked([tf.stack(of_group) for of_group in moments]), 0
    )  # (replicas, groups, 2 or 3, …)
    if replicas > 1:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        place = tf.one_hot(number, replicas, dtype=gathered.dtype)
        (gathered,) = all_reduce_sum([tf.reshape(place, (-1, 1, 1, 1)) * gathered])
    means, variances, *counts = tf.unstack(gathered, axis=2)
    if not counts:
        mean = tf.reduce_mean(means, 0)
        return mean, tf.reduce_mean(variances + tf.math.squared_difference(means, mean), 0), None
    count = tf.reduce_sum(counts[0], 0) + keras.config.epsilon()  # as Keras
    shares = counts[0] / count
    mean = tf.reduce_sum(shares * means, 0)
    return mean, tf.reduce_sum(shares * (variances + tf.math.squared_difference(means, mean)), 0), count


def _stacked(of_groups: Sequence[Any]) -> Any:
    """Returns (groups, …), without an operation for one group."""
    return tf.stack(of_groups) if len(of_groups) > 1 else tf.expand_dims(of_groups[0], 0)


def _unstacked(statistic: Any) -> list[Any]:
    return tf.unstack(statistic) if statistic.shape[0] > 1 else [tf.squeeze(statistic, 0)]
