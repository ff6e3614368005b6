"""Makes batch norm, in place of Keras's own code, span the rows of all replicas, or groups of rows, in few operations.

The moments of each replica's rows are combined by one all-reduce, and the sums of its gradients by another.
`batch_norm_arithmetic.py` has the two ways to compute what lies between them.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.invariance.batch_norm_arithmetic import Formula, Kernel, fits_kernel
from trainer.invariance.compat import compiled_by_xla
from trainer.invariance.gradients import all_reduce_sum
from trainer.invariance.step import running_step

_groups: ContextVar[int] = ContextVar("groups", default=1)


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


def normalize_in_place(layer: keras.layers.BatchNormalization, *, synchronized: bool) -> None:
    """Makes a batch norm layer normalise as described above in training, up to rounding as Keras.

    `synchronized`: over the rows of all replicas. A class of a user's with a `call` of its own keeps that.
    """
    layer.synchronized = layer.synchronized or synchronized
    original = layer.call
    of_keras = getattr(original, "__func__", None) is keras.layers.BatchNormalization.call
    if not of_keras or getattr(layer, "renorm", False):
        return

    @functools.wraps(original)
    def call(inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Returns the normalised inputs and updates the moving statistics."""
        if not training or not layer.trainable:
            return original(inputs, training=training, mask=mask)
        outputs, means, variances = _normalized(layer, inputs, mask)
        _move_averages(layer, means, variances)
        return outputs

    layer.call = call


def _normalized(layer: Any, values: Any, mask: Any) -> tuple[Any, Any, Any]:
    """Returns the outputs in training, and each group's mean and variance by channel, (groups, channels)."""
    step = running_step()
    if step and step.virtual_replicas > 1 and step.parts == 1:
        raise UserError(
            f"{step.split}: {layer.name} normalises rows outside of current_step().accumulate: call it in there, or "
            "drop --virtual_replicas"
        )
    alone = not layer.synchronized or (step and step.virtual_replicas)
    replica = None if alone else tf.distribute.get_replica_context()
    replicas, groups = replica.num_replicas_in_sync if replica else 1, _groups.get()
    way = _way(layer, values, mask, groups)
    values = values if isinstance(way, Kernel) else tf.cast(values, way.dtype)
    channels = values.shape[layer.axis]
    gamma = tf.cast(layer.gamma, way.dtype) if layer.scale else tf.ones(channels, way.dtype)
    beta = tf.cast(layer.beta, way.dtype) if layer.center else tf.zeros(channels, way.dtype)
    parts = tf.split(values, groups) if groups > 1 else [values]
    if replicas == 1 and isinstance(way, Kernel):
        outputs, *statistics = zip(*(way.training(part, gamma, beta) for part in parts), strict=True)
        means, variances = map(_stacked, statistics)
    else:
        outputs, means, variances = _over_replicas(way, replicas, gamma, beta, parts)
    return tf.cast(tf.concat(outputs, 0) if groups > 1 else outputs[0], layer.compute_dtype), means, variances


def _way(layer: Any, values: Any, mask: Any, groups: int) -> Kernel | Formula:
    """Returns the way to normalise these values. mask: which positions count, in their shape without channels.

    XLA has no such kernel: it would compose it, with a variance that is a difference of means of squares.
    """
    if mask is None and not compiled_by_xla() and fits_kernel(layer, values, groups):
        return Kernel(layer.epsilon)
    mask = None if mask is None else tf.cast(mask, tf.bool)[..., None]
    dtype = keras.backend.result_type(values.dtype, "float32")
    return Formula(layer.epsilon, layer.axis % len(values.shape), mask, dtype)


def _over_replicas(
    way: Kernel | Formula, replicas: int, gamma: Any, beta: Any, parts: Sequence[Any]
) -> tuple[tuple[Any, ...], Any, Any]:
    """Returns the outputs for each of `parts`, a group of rows, and means and variances over all replicas.

    gamma, beta: (channels,). The outputs have the gradient of a loss that is summed over replicas.
    """
    means, variances, count = _combined([way.moments(part) for part in parts], replicas)
    count = way.count(parts[0]) * replicas if count is None else count
    statistics = [*zip(_unstacked(means), _unstacked(variances), strict=True)]

    def first(gamma: Any, *tensors: Any) -> list[Any]:
        """Returns gradients by gamma, beta and parts: two sums a channel over all replicas, and what these move."""
        upstreams, parts = tensors[: len(statistics)], tensors[len(statistics) :]
        arguments = zip(upstreams, parts, statistics, strict=True)
        direct, sums = zip(*(way.gradients(x, part, *pair, gamma) for x, part, pair in arguments), strict=True)
        total = _stacked([tf.stack(pair) for pair in sums])  # (groups, 2, channels)
        if replicas > 1:
            (total,) = all_reduce_sum([total])
        factors = tf.math.rsqrt(variances + way.epsilon)
        slopes, offsets = tf.unstack(total * tf.expand_dims(gamma * factors / -count, 1), axis=1)
        if way.mask is not None:  # deviations from the mean add up to the mean times what Keras adds to the count
            offsets -= keras.config.epsilon() * means * factors * slopes / count
        lines = zip(_unstacked(slopes), _unstacked(offsets), strict=True)
        moved = [way.normalized(x, *pair, *line) for x, pair, line in zip(parts, statistics, lines, strict=True)]
        if way.mask is not None:
            moved = [tf.where(way.mask, shift, 0.0) for shift in moved]
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
                    outputs, *_ = _over_replicas(Formula(way.epsilon), replicas, gamma, beta, parts)
                gradients = inner.gradient(outputs, [gamma, beta, *parts], tensors[: len(statistics)])
            return outer.gradient(gradients, [gamma, *tensors], upstreams)

        return first(gamma, *tensors), second

    def normalized(gamma: Any, beta: Any, *parts: Any) -> tuple[Any, Any]:
        outputs = [way.normalized(x, *pair, gamma, beta) for x, pair in zip(parts, statistics, strict=True)]
        gradient = first if isinstance(way, Formula) else tf.custom_gradient(with_second)
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


def _move_averages(layer: Any, means: Any, variances: Any) -> None:
    """Moves the layer's averages as one update for each group, in order, would.

    After n groups, average <- m^n average + sum over i of (1 - m) m^(n - 1 - i) value_i. All passes of a step make one
    such update: value_i is then the mean over the passes.
    """
    groups, momentum, step = means.shape[0], layer.momentum, running_step()
    weights = (1.0 - momentum) * momentum ** np.arange(groups - 1.0, -1.0, -1.0)

    def update(statistics: Sequence[Any]) -> None:
        for average, values in zip((layer.moving_mean, layer.moving_variance), statistics, strict=True):
            moved = values * tf.constant(weights[:, None], values.dtype)
            moved = tf.squeeze(moved, 0) if groups == 1 else tf.reduce_sum(moved, 0)
            average.assign(average * momentum**groups + moved)

    if step and step.parts > 1:
        step.averaged.append((update, [means, variances]))
    else:
        update([means, variances])
