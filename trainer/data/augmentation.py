"""Augments the rows of training steps by functions of (seed, step, global row): the same on any
number of replicas.

Images are flipped and cropped at random; rows are weighted by class.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.invariance.step import StepContext

Change = Callable[[Any, StepContext], Any]  # of images


def flip(images: Any, step: StepContext) -> Any:
    """Mirrors each image left to right with probability 1/2.

    images: (rows, height, width, channels).
    """
    mirrored = step.uniform((1, 1, 1), stream="augment/flip") < 0.5
    return tf.where(mirrored, images[:, :, ::-1], images)


def crop(images: Any, step: StepContext) -> Any:
    """Shifts each image by up to 1/8 of its size in each direction, with mirrored borders.

    Keeps the shape.
    images: (rows, height, width, channels).
    """
    height, width = images.shape[1:3]
    margins = (max(1, height // 8), max(1, width // 8))
    drawn = step.uniform((2,), stream="augment/crop")
    padded = tf.pad(images, [(0, 0), (margins[0],) * 2, (margins[1],) * 2, (0, 0)], mode="REFLECT")
    for axis, (size, margin) in enumerate(zip((height, width), margins, strict=True)):
        # They are int64, because TensorFlow places int32 operations of a GPU on the host.
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
            raise UserError(
                f"augment={','.join(config.augment)}: it is for images (height, width, channels):"
                " drop it"
            )
        for change in chosen:
            images = change(images, step)
        return images

    return augment


# It makes of the parts of rows what `fit` passes, as Dataset.step_data does.
StepData = Callable[[tuple[Any, ...]], Any]


def weighted_by_class(step_data: StepData, weights: Mapping[int, float]) -> StepData:
    """Returns `step_data` with the weight of each row's class added as its sample_weight.

    Other classes have weight 1.
    y: (rows,) or (rows, 1) numbers of classes, also as 0.0 and 1.0, or (rows, classes) one-hot.
        Raises UserError for other targets and, as `fit` does, for data with a sample_weight.
    """
    if not weights:
        return step_data
    # The last weight of the table is that of all other classes.
    table = [weights.get(number, 1.0) for number in range(max(weights) + 2)]

    def weighted(parts: tuple[Any, ...]) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(step_data(parts))
        if sample_weight is not None:
            raise UserError(
                "class_weight: the data have a sample_weight, and fit takes only one of the two:"
                " drop one"
            )
        if y is None or tf.nest.is_nested(y) or y.shape.rank not in (1, 2):
            raise UserError(
                "class_weight: the targets are not one class each: use sample weights instead"
            )

        # The class of a row is its largest target, or the number itself, rounded as in `fit`.
        floatx = keras.config.floatx()
        if y.shape.rank == 2 and y.shape[1] > 1:
            labels = tf.argmax(y, axis=1)
        else:
            labels = tf.cast(tf.round(tf.cast(tf.reshape(y, (-1,)), floatx)), tf.int64)
        places = tf.clip_by_value(labels, 0, len(table) - 1)
        return x, y, tf.gather(tf.constant(table, floatx), places)

    return weighted
