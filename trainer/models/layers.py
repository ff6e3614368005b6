"""Makes layers give the same numbers on any number of replicas, in place, and holds helpers that models share.

Layers keep their classes, names, weights and settings, so that templates hold Keras's own layers.
"""

import functools
import math
from typing import Any

import keras
import tensorflow as tf

from trainer.compat import all_layers, layers_by_path
from trainer.config.train_config import TrainConfig
from trainer.distribution.draws import draw_by_row_everywhere
from trainer.distribution.layer_inputs import draw_by_row

# Layers of Keras that cannot be made independent of replicas, and what they do.
_DEPENDENT = {
    "MixUp": "mixes the rows of one replica",
    "CutMix": "mixes the rows of one replica",
    "AugMix": "chooses its changes by Python's random numbers, once for each replica",
    "RandomElasticTransform": "draws the shifts of pixels separately on each replica",
}


def make_independent(model: keras.Model, config: TrainConfig) -> None:
    """Makes the layers of `model` that draw random numbers or normalise batches independent of the number of replicas.

    Call it once, under the strategy's scope. It reaches every layer that Keras tracks, in subclassed models too.
    """
    draw_by_row_everywhere()
    for path, layer in layers_by_path(model).items():
        draw_by_row(layer, path)
        if isinstance(layer, keras.layers.BatchNormalization):
            normalize_in_place(layer, synchronized=synchronized(config))


def depends_on_replicas(model: keras.Model, replicas: int) -> list[str]:
    """Returns reasons, from its layers, why steps of `model` on several replicas may differ from those on one."""
    if replicas == 1:
        return []
    reasons = []
    for path, layer in layers_by_path(model).items():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not layer.synchronized:
            reasons.append(f"{path} normalises one replica's rows: use --sync_batch_norm=true")
        kinds = [name for name in _DEPENDENT if isinstance(layer, getattr(keras.layers, name, ()))]
        reasons.extend(f"{path} {_DEPENDENT[kind]}" for kind in kinds)
    return reasons


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
        found = _normalized(layer, inputs, mask) if training and layer.trainable else None
        if found is None:
            return original(inputs, training=training, mask=mask)
        for average, value in zip((layer.moving_mean, layer.moving_variance), found[1:], strict=True):
            average.assign(average * layer.momentum + value * (1.0 - layer.momentum))
        return found[0]

    layer.call = call


def _normalized(layer: keras.layers.BatchNormalization, inputs: Any, mask: Any) -> tuple[Any, Any, Any] | None:
    """Returns the outputs, and each channel's mean and variance; None where Keras has to compute them."""
    replica = tf.distribute.get_replica_context()
    if layer.synchronized and replica is not None and replica.num_replicas_in_sync > 1:
        return _over_replicas(layer, inputs, mask, replica)
    images = len(inputs.shape) == 4 and layer.axis in (-1, 3) and mask is None
    return _by_kernel(layer, inputs) if images and inputs.dtype != tf.float64 else None


def _over_replicas(layer: Any, inputs: Any, mask: Any, replica: Any) -> tuple[Any, Any, Any]:
    """Normalises over the rows of all replicas, which have the same number of rows, with one all-reduce each way.

    Computes in at least float32, as Keras does. The variance of each replica is taken about its own mean, and both are
    combined by Chan et al. 1979, http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf: a difference of
    means of squares would lose the variance of channels whose mean is far from 0.
    """
    values = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
    axis = layer.axis % len(values.shape)
    axes = [each for each in range(len(values.shape)) if each != axis]
    own = tf.stack(_moments(values, axes, mask))
    place = tf.one_hot(replica.replica_id_in_sync_group, replica.num_replicas_in_sync, dtype=own.dtype)
    every = replica.all_reduce(
        tf.distribute.ReduceOp.SUM, tf.reshape(place, (-1, 1, 1)) * own
    )  # (replicas, 3, channels)
    counts, means, variances = tf.unstack(every, axis=1)
    # Keras adds its epsilon to the count of a mask.
    shares = counts / (tf.reduce_sum(counts, 0) + (0.0 if mask is None else keras.config.epsilon()))
    mean = tf.reduce_sum(shares * means, 0)
    variance = tf.reduce_sum(shares * (variances + tf.square(means - mean)), 0)

    shape = [values.shape[axis] if each == axis else 1 for each in range(len(values.shape))]
    factor = tf.math.rsqrt(variance + layer.epsilon) * (tf.cast(layer.gamma, values.dtype) if layer.scale else 1.0)
    outputs = (values - tf.reshape(mean, shape)) * tf.reshape(factor, shape)
    if layer.center:
        outputs += tf.reshape(tf.cast(layer.beta, values.dtype), shape)
    return tf.cast(outputs, layer.compute_dtype), mean, variance


def _moments(values: Any, axes: list[int], mask: Any) -> tuple[Any, Any, Any]:
    """Returns the number of values, their mean and their variance for each channel; `mask`: which positions count."""
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


def _by_kernel(layer: Any, inputs: Any) -> tuple[Any, Any, Any] | None:
    """Normalises images over one replica's rows by TensorFlow's kernel; Keras makes some ten passes over memory.

    The kernel gives the unbiased variance, which is not defined for one value: Keras computes that case.
    """
    channels = inputs.shape[-1]
    if math.prod(size or 0 for size in inputs.shape[:-1]) == 1:
        return None
    scale = tf.cast(layer.gamma, tf.float32) if layer.scale else tf.ones(channels)
    offset = tf.cast(layer.beta, tf.float32) if layer.center else tf.zeros(channels)
    outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=inputs, scale=scale, offset=offset, mean=[], variance=[], epsilon=layer.epsilon, is_training=True
    )
    count = tf.cast(tf.size(inputs) // channels, tf.float32)
    return outputs, mean, tf.where(count > 1.0, variance * ((count - 1.0) / count), 0.0)


def synchronized(config: TrainConfig) -> bool:
    """Returns whether batch norm spans several replicas. Call it under the strategy's scope."""
    return config.sync_batch_norm and tf.distribute.get_strategy().num_replicas_in_sync > 1


def refresh_normalization(model: keras.Model) -> None:
    """Makes Keras's Normalization layers use newly assigned weights: they compute with values derived earlier."""
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def full_precision() -> str:
    """Returns the type of weights, which outputs and losses keep where other layers compute in 16 bits."""
    return str(keras.config.dtype_policy().variable_dtype)
