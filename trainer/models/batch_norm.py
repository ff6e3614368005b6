"""Normalises batches in place of Keras's own code: in fewer operations, over all replicas, and by groups of rows.

Several passes of a network whose weights stay the same can be one: each layer of `in_one_pass` normalises every group
of rows by its own statistics, as a pass of its own does, but sums those of all groups over replicas at once.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from trainer.distribution.step import running_step

_SUM = tf.distribute.ReduceOp.SUM
_groups: ContextVar[int] = ContextVar("groups", default=1)


class Rows(NamedTuple):
    """Holds inputs of a layer: `groups` times as many rows, one group after the other."""

    values: Any
    groups: int = 1


class Normalized(NamedTuple):
    """Holds the outputs for each `Rows`, and the mean and variance of each group and channel, (groups, channels)."""

    outputs: list[Any]
    means: Any
    variances: Any


@contextmanager
def separate_groups(count: int) -> Iterator[None]:
    """Makes batch norm within the block treat its inputs as `count` groups of equally many rows, in order.

    As in `count` passes, one a group. Only for layers of `normalize_in_place` that keep Keras's `call`.
    """
    token = _groups.set(count)
    try:
        yield
    finally:
        _groups.reset(token)


def in_one_pass(network: keras.Model, *parts: Rows) -> list[Any]:
    """Returns the outputs of a chain of layers in training for each of `parts`, as in one pass a group, in order.

    The layers run on each of the parts; only those of batch norm know of the others. Gradients flow to the last part
    alone.
    """
    for layer in network.layers[1:]:  # the first is the input
        values = [part.values for part in parts]
        if isinstance(layer, keras.layers.BatchNormalization):
            with tf.name_scope(layer.name):
                found = _normalized(layer, parts, None)
                _move_averages(layer, found)
            values = found.outputs
        else:
            values = [layer(each) for each in values]
        parts = tuple(Rows(each, part.groups) for each, part in zip(values, parts, strict=True))
    return [part.values for part in parts]


def normalize_in_place(layer: keras.layers.BatchNormalization, *, synchronized: bool) -> None:
    """Makes a batch norm layer compute in fewer passes in training, up to rounding as Keras does.

    `synchronized`: over the rows of all replicas. A class of a user's with a `call` of its own keeps that.
    """
    layer.synchronized = layer.synchronized or synchronized
    original = layer.call
    if getattr(original, "__func__", None) is not keras.layers.BatchNormalization.call or getattr(
        layer, "renorm", False
    ):
        return

    @functools.wraps(original)
    def call(inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Returns the normalised inputs and updates the moving statistics."""
        if not training or not layer.trainable or _keras_own(layer, inputs, mask):
            return original(inputs, training=training, mask=mask)
        found = _normalized(layer, [Rows(inputs, _groups.get())], mask)
        _move_averages(layer, found)
        return found.outputs[0]

    layer.call = call


def _keras_own(layer: Any, inputs: Any, mask: Any) -> bool:
    """Returns whether Keras's own code computes the layer: one group, pass and replica, nothing for the kernel."""
    step = running_step()
    several = _groups.get() > 1 or (step is not None and step.passes > 1)
    return not several and _replica_of(layer) is None and not _has_kernel(layer, inputs, mask)


def _replica_of(layer: Any) -> Any | None:
    """Returns the context of this replica if the layer normalises over several."""
    replica = tf.distribute.get_replica_context() if layer.synchronized else None
    return replica if replica is not None and replica.num_replicas_in_sync > 1 else None


def _has_kernel(layer: Any, inputs: Any, mask: Any) -> bool:
    """Returns whether TensorFlow's kernel can normalise the inputs.

    It takes images in up to 32 bits, and gives the unbiased variance, which is not defined for one value.
    """
    images = len(inputs.shape) == 4 and layer.axis in (-1, 3) and mask is None and inputs.dtype != tf.float64
    return images and math.prod(size or 0 for size in inputs.shape[:-1]) != _groups.get()


def _normalized(layer: Any, parts: Sequence[Rows], mask: Any) -> Normalized:
    replica = _replica_of(layer)
    if replica is None and all(_has_kernel(layer, each.values, mask) for each in parts):
        return _by_kernel(layer, parts)
    return _by_formula(layer, parts, mask, replica)


def _move_averages(layer: Any, found: Normalized) -> None:
    """Moves the layer's averages as one update for each group, in order, would.

    After n groups, average <- m^n average + sum over i of (1 - m) m^(n - 1 - i) value_i. All passes of micro-batches
    make one such update: value_i is then the mean over the passes, of which each adds its share.
    """
    count, momentum, step = found.means.shape[0], layer.momentum, running_step()
    number, passes = (step.pass_number, step.passes) if step else (0, 1)
    keep = momentum**count if number == 0 else 1.0
    weights = (1.0 - momentum) * momentum ** np.arange(count - 1.0, -1.0, -1.0)
    for average, values in ((layer.moving_mean, found.means), (layer.moving_variance, found.variances)):
        moved = values * tf.constant(weights[:, None] / passes, values.dtype)
        moved = tf.squeeze(moved, 0) if count == 1 else tf.reduce_sum(moved, 0)
        average.assign(average * keep + moved)


def _by_formula(layer: Any, parts: Sequence[Rows], mask: Any, replica: Any | None) -> Normalized:
    """Normalises over the rows of all replicas, which have the same number of rows, with one all-reduce each way.

    Computes in at least float32, as Keras does.
    """
    kind = keras.backend.result_type(parts[0].values.dtype, "float32")
    formula = _Formula(layer.axis % len(parts[0].values.shape) + 1, layer.epsilon, mask is not None, replica)
    *others, last = (_by_group(tf.cast(each.values, kind), each.groups) for each in parts)
    of_others = [tf.stop_gradient(formula.moments(values)) for values in others]

    def forward(values: Any, gamma: Any, beta: Any) -> tuple[Any, ...]:
        own = formula.moments(values, None if mask is None else _by_group(mask, parts[0].groups))
        counts, means, variances = formula.combined(tf.concat([*of_others, own], 1))
        count, mean, variance = (each[-parts[-1].groups :] for each in (counts, means, variances))
        return formula.scaled(values, mean, variance, gamma, beta), means, variances, (count, mean, variance)

    def forward_with_gradient(values: Any, gamma: Any, beta: Any) -> Any:
        *found, of_last = forward(values, gamma, beta)
        return tuple(found), lambda upstream, *_: formula.gradient(upstream, values, gamma, *of_last)

    channels = last.shape[formula.axis]
    gamma = tf.cast(layer.gamma, kind) if layer.scale else tf.ones(channels, kind)
    beta = tf.cast(layer.beta, kind) if layer.center else tf.zeros(channels, kind)
    # Keras's epsilon in the count of a mask makes the short gradient inexact.
    normalize = forward if formula.masked else tf.custom_gradient(forward_with_gradient)
    output, means, variances, *_ = normalize(last, gamma, beta)
    sizes = [each.groups for each in parts]
    pairs = zip(others, tf.split(means, sizes), tf.split(variances, sizes), strict=False)
    outputs = [*(formula.scaled(*each, gamma, beta) for each in pairs), output]
    return Normalized([tf.cast(_joined(each), layer.compute_dtype) for each in outputs], means, variances)


class _Formula(NamedTuple):
    """Normalises (groups, rows, …), with channels at `axis`, in operations of TensorFlow."""

    axis: int
    epsilon: float
    masked: bool  # whether only some of the positions count
    replica: Any | None  # the context of this one, if the rows of several belong together

    def _axes(self, values: Any) -> list[int]:
        return [each for each in range(1, len(values.shape)) if each != self.axis]

    def _beside(self, statistic: Any, values: Any) -> Any:
        """Returns (groups, channels) or (channels,) in a shape that broadcasts with `values`."""
        shape = [1] * len(values.shape)
        shape[0], shape[self.axis] = (-1, values.shape[self.axis])
        return tf.reshape(statistic, shape)

    def moments(self, values: Any, mask: Any = None) -> Any:
        """Returns each group's and channel's count, mean and variance on this replica: (3, groups, channels)."""
        return tf.stack(_moments(values, self._axes(values), mask))

    def combined(self, own: Any) -> tuple[Any, Any, Any]:
        """Returns counts, means and variances over all replicas, (groups, channels), of those of this one.

        The variance of each replica is taken about its own mean, and both are combined by Chan et al. 1979,
        http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf: a difference of means of squares would
        lose the variance of channels whose mean is far from 0.
        """
        if self.replica is None:
            return own[0], own[1], own[2]
        place = tf.one_hot(self.replica.replica_id_in_sync_group, self.replica.num_replicas_in_sync, dtype=own.dtype)
        every = self.replica.all_reduce(_SUM, tf.reshape(place, (-1, 1, 1, 1)) * own)
        counts, means, variances = tf.unstack(every, axis=1)  # of (replicas, 3, groups, channels)
        # Keras adds its epsilon to the count of a mask.
        count = tf.reduce_sum(counts, 0) + (keras.config.epsilon() if self.masked else 0.0)
        shares = counts / count
        mean = tf.reduce_sum(shares * means, 0)
        return count, mean, tf.reduce_sum(shares * (variances + tf.square(means - mean)), 0)

    def scaled(self, values: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
        """Returns the outputs. mean, variance: (groups, channels); gamma, beta: (channels,)."""
        factor = tf.math.rsqrt(variance + self.epsilon) * gamma
        return (values - self._beside(mean, values)) * self._beside(factor, values) + self._beside(beta, values)

    def gradient(
        self, upstream: Any, values: Any, gamma: Any, count: Any, mean: Any, variance: Any
    ) -> tuple[Any, Any, Any]:
        """Returns the gradients by values, gamma and beta, of a loss that is summed over replicas.

        Two numbers a channel are summed over all rows, where the chain rule through each operation sums a dozen.
        """
        factor = tf.math.rsqrt(variance + self.epsilon)
        normal = (values - self._beside(mean, values)) * self._beside(factor, values)
        axes = self._axes(values)
        own = tf.stack([tf.reduce_sum(upstream, axes), tf.reduce_sum(upstream * normal, axes)])
        total = own if self.replica is None else self.replica.all_reduce(_SUM, own)
        offset, slope = tf.unstack(total / count)
        centred = upstream - self._beside(offset, values) - normal * self._beside(slope, values)
        by_beta, by_gamma = tf.unstack(tf.reduce_sum(own, 1))
        return centred * self._beside(factor * gamma, values), by_gamma, by_beta


def _by_group(values: Any, groups: int) -> Any:
    """Returns (groups, rows, …) of (groups x rows, …)."""
    sizes = keras.ops.shape(values)
    return tf.reshape(values, (groups, sizes[0] // groups, *sizes[1:]))


def _joined(values: Any) -> Any:
    """Returns (groups x rows, …) of (groups, rows, …)."""
    groups, rows, *sizes = keras.ops.shape(values)
    return tf.reshape(values, (groups * rows, *sizes))


def _moments(values: Any, axes: list[int], mask: Any) -> tuple[Any, Any, Any]:
    """Returns the number of values, their mean and their variance for each group and channel: (groups, channels).

    `mask`: which positions count.
    """
    if mask is None:
        mean, variance = tf.nn.moments(values, axes)
        sizes = keras.ops.shape(values)
        return tf.fill(mean.shape, tf.cast(math.prod(sizes[axis] for axis in axes), values.dtype)), mean, variance
    counted = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(values))
    count = tf.reduce_sum(tf.cast(counted, values.dtype), axes, keepdims=True)
    mean = tf.math.divide_no_nan(tf.reduce_sum(tf.where(counted, values, 0.0), axes, keepdims=True), count)
    squares = tf.square(tf.where(counted, values - mean, 0.0))
    variance = tf.math.divide_no_nan(tf.reduce_sum(squares, axes, keepdims=True), count)
    return tf.squeeze(count, axes), tf.squeeze(mean, axes), tf.squeeze(variance, axes)


def _by_kernel(layer: Any, parts: Sequence[Rows]) -> Normalized:
    """Normalises images over one replica's rows by TensorFlow's kernel, once a group.

    Keras makes some ten passes over memory.
    """
    channels = parts[0].values.shape[-1]
    scale = tf.cast(layer.gamma, tf.float32) if layer.scale else tf.ones(channels)
    offset = tf.cast(layer.beta, tf.float32) if layer.center else tf.zeros(channels)
    outputs, means, variances = [], [], []
    for values, groups in parts:
        found = [
            tf.raw_ops.FusedBatchNormV3(
                x=each, scale=scale, offset=offset, mean=[], variance=[], epsilon=layer.epsilon, is_training=True
            )
            for each in (tf.split(values, groups) if groups > 1 else [values])
        ]
        outputs.append(tf.concat([each.y for each in found], 0) if groups > 1 else found[0].y)
        means += [each.batch_mean for each in found]
        variances += [_biased(each.batch_variance, values, groups) for each in found]
    if len(means) == 1:
        return Normalized(outputs, tf.expand_dims(means[0], 0), tf.expand_dims(variances[0], 0))
    return Normalized(outputs, tf.stack(means), tf.stack(variances))


def _biased(variance: Any, values: Any, groups: int) -> Any:
    """Returns the mean of squares about the mean, of the variance that the kernel gives; 0 for one value."""
    *sizes, _ = keras.ops.shape(values)
    count = math.prod(sizes) // groups
    if isinstance(count, int):
        return variance * ((count - 1.0) / count)
    count = tf.cast(count, tf.float32)
    return tf.where(count > 1.0, variance * ((count - 1.0) / count), 0.0)
