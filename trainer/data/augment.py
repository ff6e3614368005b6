"""Flips and crops images at random, as a function of (seed, step, global row): the same on any number of replicas."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.settings.train_config import AUGMENTATIONS, TrainConfig
from trainer.invariance.step import StepContext

Augment = Callable[[Any, StepContext], Any]


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
        # Not int32, which a GPU's kernels compute with on the host.
        offsets = tf.cast(tf.floor(drawn[:, axis] * (2 * margin + 1)), tf.int64)
        pixels = offsets[:, None] + tf.range(size, dtype=tf.int64)
        padded = tf.gather(padded, pixels, axis=1 + axis, batch_dims=1)
    return padded


_BY_NAME: dict[str, Augment] = {"flip": flip, "crop": crop}
assert set(_BY_NAME) == set(AUGMENTATIONS)


def augmentation(config: TrainConfig) -> Augment | None:
    """Returns the augmentations of `config.augment`, applied one after another, or None."""
    chosen = [_BY_NAME[name] for name in config.augmentations]
    if not chosen:
        return None

    def augment(images: Any, step: StepContext) -> Any:
        if tf.nest.is_nested(images) or images.shape.rank != 4:
            raise UserError(f"augment={config.augment}: it is for images (height, width, channels): drop it")
        for change in chosen:
            images = change(images, step)
        return images

    return augment
