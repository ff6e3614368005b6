"""Augments the rows of training steps by functions of (seed, step, global row): the same on any number of replicas.

Images are flipped and cropped at random; labels are softened by label smoothing and mixup; rows are weighted by class.

Label smoothing (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567, section 7) gives a share of each label to all
classes alike. Mixup (Zhang et al. 2018, https://arxiv.org/abs/1710.09412) takes weighted means of two examples and of
their labels, with weights of Beta(alpha, alpha).

Partners are rows 2k and 2k + 1 of the global batch. The order of the rows is random already, so these pairs are as
random as those of a permutation; and a replica with an even number of rows has both rows of each pair, so that any
number of replicas mixes the same rows, without reading a row twice or sending one. Each row keeps the larger of the two
weights, because both orders of a pair are equally likely: no example is lost from a batch, and the label with the
largest share is the row's own.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.invariance.step import StepContext

Change = Callable[[Any, StepContext], Any]  # of images, or of a step's data


def flip(images: Any, step: StepContext) -> Any:
    """Mirrors each image left to right with probability 1/2. images: (rows, height, width, channels)."""
    mirrored = step.uniform((1, 1, 1), stream="augment/flip") < 0.5
    return tf.where(mirrored, images[:, :, ::-1], images)


def crop(images: Any, step: StepContext) -> Any:
    """Shifts each image by up to 1/8 of its size in each direction, with mirrored borders. Keeps the shape.

    images: (rows, height, width, channels).
    """
    height, width = images.shape[1:3]
    margins = (max(1, height // 8), max(1, width // 8))
    drawn = step.uniform((2,), stream="augment/crop")
    padded = tf.pad(images, [(0, 0), (margins[0],) * 2, (margins[1],) * 2, (0, 0)], mode="REFLECT")
    for axis, (size, margin) in enumerate(zip((height, width), margins, strict=True)):
        # int64, because TensorFlow places int32 operations of a GPU on the host.
        offsets = tf.cast(tf.floor(drawn[:, axis] * (2 * margin + 1)), tf.int64)
        pixels = offsets[:, None] + tf.range(size, dtype=tf.int64)
        padded = tf.gather(padded, pixels, axis=1 + axis, batch_dims=1)
    return padded


_BY_NAME: dict[str, Change] = {"flip": flip, "crop": crop}


def augmentation(config: TrainConfig) -> Change | None:
    """Returns the augmentations of `config.augment`, applied one after another, or None."""
    chosen = [_BY_NAME[name] for name in config.augment]
    if not chosen:
        return None

    def augment(images: Any, step: StepContext) -> Any:
        if tf.nest.is_nested(images) or images.shape.rank != 4:
            raise UserError(f"augment={','.join(config.augment)}: it is for images (height, width, channels): drop it")
        for change in chosen:
            images = change(images, step)
        return images

    return augment


def softening(config: TrainConfig, classes: int) -> Change | None:
    """Returns a function for label smoothing and mixup of (x, y) or (x, y, sample_weight); None if both are off.

    It takes floating-point x, (rows, …), and integer labels, and returns y as (rows, classes) in floatx. The weights of
    rows do not change.
    """
    smoothing, alpha = config.label_smoothing, config.mixup
    if not (smoothing or alpha):
        return None

    def soften(data: Any, step: StepContext) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        labels = tf.one_hot(tf.reshape(y, (-1,)), classes, dtype=keras.config.floatx())
        labels = labels * (1.0 - smoothing) + smoothing / classes
        if alpha:
            share = own_share(step, alpha)
            x, labels = mixed(x, share), mixed(labels, share)
        return (x, labels) if weight is None else (x, labels, weight)

    return soften


def own_share(step: StepContext, alpha: float) -> Any:
    """Returns each row's share in its mixture, (rows,): the larger of b and 1 - b, with b of Beta(alpha, alpha).

    It is computed from two uniform numbers, for any alpha, without underflow: if T has Student's distribution with
    2 alpha degrees of freedom, 1/2 + T / (2 sqrt(2 alpha + T^2)) has the distribution Beta(alpha, alpha), and Bailey
    1994 gives T: https://doi.org/10.1090/S0025-5718-1994-1219702-8
    """
    drawn = step.uniform((2,), stream="mixup")
    power = tf.math.log1p(-drawn[:, 0]) / alpha
    part = -tf.math.expm1(power) * tf.square(tf.cos(2 * math.pi * drawn[:, 1]))
    return 0.5 + 0.5 * tf.sqrt(part / (tf.exp(power) + part))


def mixed(values: Any, share: Any) -> Any:
    """Mixes `share` of each row with 1 - `share` of its partner; values: (rows, …), an even number of rows."""
    shape, size = values.shape, values.shape.rank - 1
    partner = tf.reshape(tf.reverse(tf.reshape(values, (-1, 2, *shape[1:])), axis=[1]), (-1, *shape[1:]))
    return partner + tf.reshape(share, (-1, *[1] * size)) * (values - partner)


AsFit = Callable[[tuple[Any, ...]], Any]  # as Dataset.as_fit: from the parts of rows to what `fit` passes


def weighted_by_class(as_fit: AsFit, weights: Mapping[int, float]) -> AsFit:
    """Returns `as_fit` with the weight of each row's class added as its sample_weight; other classes have weight 1.

    y: (rows,) or (rows, 1) integers, or (rows, classes) one-hot. Raises UserError for other targets and, as `fit`
    does, for data with a sample_weight.
    """
    if not weights:
        return as_fit
    table = [weights.get(number, 1.0) for number in range(max(weights) + 1)]

    def weighted(parts: tuple[Any, ...]) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(as_fit(parts))
        if sample_weight is not None:
            raise UserError("class_weight: the data have a sample_weight, and fit takes only one of the two: drop one")
        shape = None if y is None or tf.nest.is_nested(y) else y.shape
        if shape is not None and shape.rank == 2 and shape[1] > 1:
            labels = tf.argmax(y, axis=1, output_type=tf.int32)
        elif shape is not None and shape.rank in (1, 2) and y.dtype.is_integer:
            labels = tf.cast(tf.reshape(y, (-1,)), tf.int32)
        else:
            raise UserError("class_weight: the targets are not one class each: use sample weights instead")
        table_weights = tf.gather(
            tf.constant(table, keras.config.floatx()), tf.clip_by_value(labels, 0, len(table) - 1)
        )
        return x, y, tf.where(labels < len(table), table_weights, tf.ones_like(table_weights))

    return weighted
