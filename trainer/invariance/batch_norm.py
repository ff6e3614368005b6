"""Replaces Keras's batch norm in training by one that can span the rows of all replicas, or
separate groups of rows.

One all-reduce combines the moments (mean and variance) of the replicas, and another the sums that
the gradients need. In between, each replica normalises its own rows in one of two ways: `Kernel`
uses TensorFlow's fused kernel, which is fast but takes only images of at most 32 bits; `Formula`
takes everything else: masks, any shape and axis, float64.
"""

import itertools
import math
import operator
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
from trainer.invariance.step import copies_of_rows, holding, parts_on_replicas, running_step


@dataclass(frozen=True)
class Formula:
    """Normalises values, (rows, …) with channels at `axis`, by ordinary operations."""

    epsilon: float
    axis: int = 3
    mask: Any = None  # true where a value counts; its shape broadcasts with that of the values
    dtype: Any = tf.float32

    def _beside(self, statistic: Any, values: Any) -> Any:
        """Returns `statistic`, (channels,), in a shape that broadcasts with `values`."""
        shape = [1] * len(values.shape)
        shape[self.axis] = -1
        return tf.reshape(statistic, shape)

    def _other_axes(self, values: Any) -> list[int]:
        return [axis for axis in range(len(values.shape)) if axis != self.axis]

    def _channel_sums(self, values: Any) -> Any:
        return tf.reduce_sum(values, self._other_axes(values))

    def count(self, values: Any) -> Any:
        """Returns how many values each channel has.

        It is an int if it is known while tracing, else a tensor.
        """
        sizes = keras.ops.shape(values)
        count = math.prod(sizes[axis] for axis in self._other_axes(values))
        return count if isinstance(count, int) else tf.cast(count, self.dtype)

    def moments(self, values: Any) -> list[Any]:
        """Returns the mean and the variance of each channel and, with a mask, the count of values.

        The mask decides which values count.
        """
        if self.mask is None:
            return list(tf.nn.moments(values, self._other_axes(values)))
        mask = tf.broadcast_to(tf.cast(self.mask, self.dtype), tf.shape(values))
        count = self._channel_sums(mask)
        mean = tf.math.divide_no_nan(self._channel_sums(tf.where(self.mask, values, 0.0)), count)
        squares = tf.square(tf.where(self.mask, values - self._beside(mean, values), 0.0))
        return [mean, tf.math.divide_no_nan(self._channel_sums(squares), count), count]

    def normalized(self, values: Any, mean: Any, variance: Any, scale: Any, offset: Any) -> Any:
        """Returns scale * (values - mean) / sqrt(variance + epsilon) + offset."""
        factor = self._beside(tf.math.rsqrt(variance + self.epsilon) * scale, values)
        return (values - self._beside(mean, values)) * factor + self._beside(offset, values)

    def gradients(
        self, upstream: Any, values: Any, mean: Any, variance: Any, gamma: Any
    ) -> tuple[Any, list[Any]]:
        """Returns the gradients for `values`, with constant statistics, and for gamma and beta.

        The latter two are sums over each channel: of upstream times the normalised values, and of
        upstream.
        """
        factor = tf.math.rsqrt(variance + self.epsilon)
        slope = self._channel_sums(upstream * (values - self._beside(mean, values))) * factor
        sums = [slope, self._channel_sums(upstream)]
        return upstream * self._beside(gamma * factor, values), sums

    def by_plain_sums(
        self, gamma: Any, beta: Any, groups: Sequence[Any]
    ) -> tuple[tuple[Any, ...], Any, Any]:
        """Returns what `_over_replicas` does, by sums alone, which `trainer.proof` can follow."""
        outputs = []
        statistics = []
        for group in groups:
            mask = tf.ones_like(group)
            if self.mask is not None:
                mask = tf.cast(self.mask, self.dtype) * mask
            (count,) = all_reduce_sum([self._channel_sums(mask)])
            count += 0.0 if self.mask is None else keras.config.epsilon()
            (total,) = all_reduce_sum([self._channel_sums(mask * group)])
            mean = total / count
            squares = mask * tf.square(group - self._beside(mean, group))
            variance = all_reduce_sum([self._channel_sums(squares)])[0] / count
            outputs.append(self.normalized(group, mean, variance, gamma, beta))
            statistics.append((mean, variance))
        means, variances = zip(*statistics, strict=True)
        return tuple(outputs), _stacked(means), _stacked(variances)


class Kernel(Formula):
    """Normalises images, (rows, height, width, channels), by TensorFlow's fused kernel.

    Its statistics are float32.
    """

    def training(self, values: Any, gamma: Any, beta: Any) -> tuple[Any, Any, Any]:
        """Returns the normalised `values`, their mean and their variance, for a single replica."""
        normalized = self._forward(values, gamma, beta)
        count = self.count(values)
        # The kernel divides by count - 1, Keras by count: for a single value Keras's variance is 0.
        biased = normalized.batch_variance * ((count - 1.0) / count)
        variance = biased if isinstance(count, int) else tf.where(count > 1.0, biased, 0.0)
        return normalized.y, normalized.batch_mean, variance

    def _forward(self, values: Any, scale: Any, offset: Any, *statistics: Any) -> Any:
        mean, variance = statistics or ([], [])
        return tf.raw_ops.FusedBatchNormV3(
            x=values,
            scale=scale,
            offset=offset,
            mean=mean,
            variance=variance,
            epsilon=self.epsilon,
            is_training=not statistics,
        )

    def moments(self, values: Any) -> list[Any]:
        """Returns the mean and the variance of each channel."""
        unused = tf.zeros(values.shape[-1])  # gamma and beta, which the statistics do not depend on
        return list(self.training(values, unused, unused)[1:])

    def normalized(self, values: Any, mean: Any, variance: Any, scale: Any, offset: Any) -> Any:
        """Returns scale * (values - mean) / sqrt(variance + epsilon) + offset."""
        return self._forward(values, scale, offset, mean, variance).y

    def gradients(
        self, upstream: Any, values: Any, mean: Any, variance: Any, gamma: Any
    ) -> tuple[Any, list[Any]]:
        """Returns what `Formula.gradients` returns."""
        gradients = tf.raw_ops.FusedBatchNormGradV3(
            y_backprop=upstream,
            x=values,
            scale=gamma,
            reserve_space_1=mean,
            reserve_space_2=variance,
            reserve_space_3=tf.zeros(0),
            epsilon=self.epsilon,
            is_training=False,
        )
        return gradients.x_backprop, [gradients.scale_backprop, gradients.offset_backprop]


_groups: ContextVar[int] = ContextVar("groups", default=1)


def separate_groups(count: int) -> AbstractContextManager[int]:
    """Makes batch norm in the block normalise `count` groups of equally many consecutive rows.

    The result is that of `count` calls, one for each group. Only layers that `normalize_in_place`
    changed do so.
    """
    return holding(_groups, count)


# A subclass may have these methods and still compute alike.
_SETTINGS = ("build", "get_config", "compute_output_shape")


def normalize_in_place(layer: keras.layers.BatchNormalization, *, synchronized: bool) -> None:
    """Makes a batch norm layer normalise in training by this module.

    Its results are Keras's up to rounding.
    synchronized: whether it normalises over the rows of all replicas. A layer of a user's class
        that computes otherwise, by a `call` or `_moments` of its own, keeps these.
    """
    layer.synchronized = layer.synchronized or synchronized
    kinds = type(layer).__mro__
    subclasses = kinds[: kinds.index(keras.layers.BatchNormalization)]
    own = {*itertools.chain(*map(vars, subclasses))} & {*vars(keras.layers.BatchNormalization)}
    methods = [name for name in own if name not in _SETTINGS and not name.startswith("__")]
    computes = "call" in vars(layer) or bool(methods)
    if computes or getattr(layer, "renorm", False):
        return

    def call(original: Any, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Returns the normalised inputs and updates the moving statistics.

        mask: (rows, …) without channels.
        """
        if not training or not layer.trainable:
            return original(inputs, training=training, mask=mask)
        step = running_step()
        if step and step.virtual_replicas > 1 and step.micro_batch_count == 1:
            raise UserError(
                f"{step.split}: {layer.name} normalises rows outside of current_step().accumulate:"
                " call it in there, or drop --virtual_replicas"
            )

        # With virtual replicas, or by its settings, it normalises the rows of this replica alone.
        own_rows_only = not layer.synchronized or (step and step.virtual_replicas)
        replica = None if own_rows_only else tf.distribute.get_replica_context()
        replicas = parts_on_replicas(replica)
        group_count = _groups.get()

        # XLA lacks the fused kernel: it would compute the variance as E[x^2] - E[x]^2, which loses
        # digits. For groups of a single value the kernel's unbiased variance is undefined.
        are_images = len(inputs.shape) == 4 and layer.axis in (-1, 3)
        fits_kernel = are_images and inputs.dtype != tf.float64 and mask is None
        single = math.prod(size or 0 for size in inputs.shape[:-1]) == group_count
        method: Formula = Kernel(layer.epsilon)
        if not fits_kernel or compiled_by_xla() or single:
            mask = None if mask is None else tf.cast(mask, tf.bool)[..., None]
            dtype = keras.backend.result_type(inputs.dtype, "float32")
            method = Formula(layer.epsilon, layer.axis % len(inputs.shape), mask, dtype)
            inputs = tf.cast(inputs, dtype)
        channels = inputs.shape[layer.axis]
        dtype = method.dtype
        gamma = tf.cast(layer.gamma, dtype) if layer.scale else tf.ones(channels, dtype)
        beta = tf.cast(layer.beta, dtype) if layer.center else tf.zeros(channels, dtype)
        groups = tf.split(inputs, group_count) if group_count > 1 else [inputs]

        # Each group's mean and variance by channel: (groups, channels).
        if getattr(replica, "traced", False):
            plain = Formula(layer.epsilon, method.axis, mask, method.dtype)
            wide = [tf.cast(group, method.dtype) for group in groups]
            outputs, means, variances = plain.by_plain_sums(gamma, beta, wide)
        elif replicas == 1 and isinstance(method, Kernel):
            results = [method.training(group, gamma, beta) for group in groups]
            outputs, *statistics = zip(*results, strict=True)
            means, variances = map(_stacked, statistics)
        else:
            outputs, means, variances = _over_replicas(method, replicas, gamma, beta, groups)

        # The moving averages get what one update for each group, in order, would give. After n
        # groups: average <- m^n average + sum over i of (1 - m) m^(n - 1 - i) value_i.
        momentum = layer.momentum
        weights = (1.0 - momentum) * momentum ** np.arange(group_count - 1.0, -1.0, -1.0)

        def update(statistics: Sequence[Any]) -> None:
            averages = (layer.moving_mean, layer.moving_variance)
            for average, values in zip(averages, statistics, strict=True):
                moved = values * tf.constant(weights[:, None], values.dtype)
                moved = tf.squeeze(moved, 0) if group_count == 1 else tf.reduce_sum(moved, 0)
                average.assign(average * momentum**group_count + moved)

        # Micro-batches together make one update, with the mean of their values.
        if step and step.micro_batch_count > 1:
            step.averaged.append((update, [means, variances]))
        else:
            update([means, variances])
        output = tf.concat(outputs, 0) if group_count > 1 else outputs[0]
        return tf.cast(output, layer.compute_dtype)

    wrap("keras.layers.Layer.call", call, owner=layer)


def _over_replicas(
    method: Formula, replicas: int, gamma: Any, beta: Any, groups: Sequence[Any]
) -> tuple[tuple[Any, ...], Any, Any]:
    """Returns the normalised rows of each group, and its mean and variance over all replicas.

    groups: this replica's inputs, cut into groups of rows; gamma, beta: (channels,). The outputs
        have the gradient of a loss that is summed over replicas.
    """
    # Replicas exchange of each group the mean, the variance and, with a mask, the count: (replicas,
    # groups, 2 or 3, channels).
    gathered = tf.expand_dims(_stacked([tf.stack(method.moments(group)) for group in groups]), 0)
    if replicas > 1:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group // copies_of_rows()
        place = tf.one_hot(number, replicas, dtype=gathered.dtype)
        (gathered,) = all_reduce_sum([tf.reshape(place, (-1, 1, 1, 1)) * gathered])
    own_means, own_variances, *counts = tf.unstack(gathered, axis=2)

    # Each replica took the variance about its own mean. They are combined as by Chan et al. 1979,
    # http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf: E[x^2] - E[x]^2 would
    # lose the variance of channels whose mean is far from 0.
    if counts:
        count = tf.reduce_sum(counts[0], 0) + keras.config.epsilon()  # as Keras
        shares = counts[0] / count
        means = tf.reduce_sum(shares * own_means, 0)
        squares = own_variances + tf.math.squared_difference(own_means, means)
        variances = tf.reduce_sum(shares * squares, 0)
    else:
        count = method.count(groups[0]) * replicas
        means = tf.reduce_mean(own_means, 0)
        variances = tf.reduce_mean(own_variances + tf.math.squared_difference(own_means, means), 0)
    statistics = [*zip(_unstacked(means), _unstacked(variances), strict=True)]

    def first_order(gamma: Any, *tensors: Any) -> list[Any]:
        """Returns the gradients for gamma, beta and each group.

        tensors: the upstream gradients, then the groups. The gradient for a group is the one for
        constant statistics, and a shift by which the loss changes with them.
        """
        upstreams = tensors[: len(statistics)]
        groups = tensors[len(statistics) :]
        arguments = zip(upstreams, groups, statistics, strict=True)
        results = [method.gradients(x, group, *pair, gamma) for x, group, pair in arguments]
        direct, sums = zip(*results, strict=True)

        # The statistics depend on the rows of all replicas, so their gradients are sums over them.
        total = _stacked([tf.stack(pair) for pair in sums])  # (groups, 2, channels)
        if replicas > 1:
            (total,) = all_reduce_sum([total])
        factors = tf.math.rsqrt(variances + method.epsilon)
        slopes, offsets = tf.unstack(total * tf.expand_dims(gamma * factors / -count, 1), axis=1)
        # Keras adds epsilon to the count: deviations add up to epsilon * mean, not to 0.
        if method.mask is not None:
            offsets -= keras.config.epsilon() * means * factors * slopes / count
        lines = zip(_unstacked(slopes), _unstacked(offsets), strict=True)
        terms = zip(groups, statistics, lines, strict=True)
        shifts = [method.normalized(x, *pair, *line) for x, pair, line in terms]
        if method.mask is not None:
            shifts = [tf.where(method.mask, shift, 0.0) for shift in shifts]
        for_gamma, for_beta = map(tf.add_n, zip(*sums, strict=True))
        return [for_gamma, for_beta, *map(operator.add, direct, shifts)]

    def with_second_order(gamma: Any, *tensors: Any) -> tuple[Any, Any]:
        """Returns what `first_order` returns, and its gradient, which differentiates the formula.

        The kernel's own second gradient takes the statistics for constants.
        """

        def second_order(*upstreams: Any) -> Any:
            groups = tensors[len(statistics) :]
            with tf.GradientTape() as outer:
                outer.watch([gamma, *tensors])
                with tf.GradientTape() as inner:
                    inner.watch([gamma, beta, *groups])
                    formula = Formula(method.epsilon)
                    outputs, *_ = _over_replicas(formula, replicas, gamma, beta, groups)
                sources = [gamma, beta, *groups]
                gradients = inner.gradient(outputs, sources, tensors[: len(statistics)])
            return outer.gradient(gradients, [gamma, *tensors], upstreams)

        return first_order(gamma, *tensors), second_order

    def normalized(gamma: Any, beta: Any, *groups: Any) -> tuple[Any, Any]:
        pairs = zip(groups, statistics, strict=True)
        outputs = [method.normalized(x, *pair, gamma, beta) for x, pair in pairs]
        gradient = first_order
        if isinstance(method, Kernel):
            gradient = tf.custom_gradient(with_second_order)
        return outputs, lambda *upstreams: gradient(gamma, *upstreams, *groups)

    return tuple(tf.custom_gradient(normalized)(gamma, beta, *groups)), means, variances


def _stacked(of_groups: Sequence[Any]) -> Any:
    """Returns the tensors of all groups as one, (groups, …), without copying a single one."""
    return tf.stack(of_groups) if len(of_groups) > 1 else tf.expand_dims(of_groups[0], 0)


def _unstacked(statistic: Any) -> list[Any]:
    """Returns the tensor of each group: the inverse of `_stacked`."""
    return tf.unstack(statistic) if statistic.shape[0] > 1 else [tf.squeeze(statistic, 0)]
