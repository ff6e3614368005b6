"""Converts images between a network's range [-1, 1] and grey levels [0, 255], and arranges them in grids."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.errors import UserError

UInt8Array = npt.NDArray[np.uint8]


def from_uint8(images: Any) -> Any:
    """Converts grey levels [0, 255] to [-1, 1], in the tensor's float type."""
    return images / 127.5 - 1.0


def to_uint8(images: Any) -> Any:
    """Converts [-1, 1] to uint8 grey levels, rounded to the nearest."""
    return tf.cast(tf.clip_by_value(tf.round((images + 1.0) * 127.5), 0.0, 255.0), tf.uint8)


def noise(seed: int, count: int, latent_dim: int, dtype: Any = tf.float32) -> Any:
    """Returns the fixed noise of sample grids: (count, latent_dim), a function of seed, row and column only."""
    drawn = tf.random.stateless_normal((count, latent_dim), seed=(seed, 0x5EED), alg="philox")
    return tf.cast(drawn, dtype)


def as_uint8(images: Any) -> UInt8Array:
    """Returns the images that a model's `sample` gave as an array. Raises UserError if they are none."""
    array = np.asarray(images)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] not in (1, 3):
        raise UserError(
            f"sample returned {array.dtype} of shape {array.shape}: it must return uint8 images (count, height, width, "
            "1 or 3)"
        )
    return array


def grid(images: UInt8Array, margin: int = 2) -> UInt8Array:
    """Arranges (count, height, width, channels) in one picture, as close to a square as `count` allows.

    Small images are enlarged by an integer factor to about 64 pixels.
    """
    factor = max(1, 64 // images.shape[1])
    images = images.repeat(factor, axis=1).repeat(factor, axis=2)
    count, height, width, channels = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    picture = np.full((rows * (height + margin) + margin, columns * (width + margin) + margin, channels), 255, np.uint8)
    for index, image in enumerate(images):
        top = margin + index // columns * (height + margin)
        left = margin + index % columns * (width + margin)
        picture[top : top + height, left : left + width] = image
    return picture


def encode_png(picture: UInt8Array) -> bytes:
    """Encodes (height, width, 1 or 3) uint8 as a PNG file."""
    return bytes(tf.io.encode_png(picture).numpy())
