"""Arranges generated images in sample grids.

The noise of a grid depends on the seed alone, so that grids of several steps show the same images.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.errors import UserError

UInt8Array = npt.NDArray[np.uint8]

_SAMPLES = 64  # images of a sample grid
# A grid with one class in each row has so many columns.
_COLUMNS = 10
_MOST_CLASSES = 20


def noise(seed: int, count: int, latent_dim: int, dtype: Any = tf.float32) -> Any:
    """Returns the fixed noise of sample grids, (count, latent_dim).

    It is a function of seed, row and column only.
    """
    shape = (count, latent_dim)
    return tf.cast(tf.random.stateless_normal(shape, seed=(seed, 0x5EED), alg="philox"), dtype)


def noise_and_labels(
    seed: int, columns: int, labels: Sequence[int], latent_dim: int, dtype: Any = tf.float32
) -> tuple[Any, Any]:
    """Returns the noise and the labels of a grid with one class in each row.

    Each column has the same noise.
    labels: the class of each row. Returns (rows x columns, latent_dim) and (rows x columns,) int32.
    """
    drawn = noise(seed, columns, latent_dim, dtype)
    return tf.tile(drawn, (len(labels), 1)), tf.repeat(tf.constant(labels, tf.int32), columns)


def sample_grid(
    generate: Callable[..., Any], seed: int, latent_dim: int, classes: int, dtype: Any
) -> UInt8Array:
    """Returns a grid of the images that a model's `sample` makes from fixed noise.

    With classes it has a row for each.
    """
    if not classes:
        return grid(as_uint8(generate(noise(seed, _SAMPLES, latent_dim, dtype))))
    inputs = noise_and_labels(seed, _COLUMNS, range(min(classes, _MOST_CLASSES)), latent_dim, dtype)
    return grid(as_uint8(generate(*inputs)), _COLUMNS)


def as_uint8(images: Any) -> UInt8Array:
    """Returns the images that a model's `sample` returned as an array.

    Raises UserError if they are no images.
    """
    array = np.asarray(images)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] not in (1, 3):
        raise UserError(
            f"sample returned {array.dtype} of shape {array.shape}: it must return uint8 images"
            " (count, height, width, 1 or 3)"
        )
    return array


def grid(images: UInt8Array, columns: int = 0, margin: int = 2) -> UInt8Array:
    """Arranges (count, height, width, channels) in one picture, about as a square.

    columns: images in a row; 0: as in a square. Small images are enlarged by an integer factor to
        about 64 pixels.
    """
    factor = max(1, 64 // images.shape[1])
    images = images.repeat(factor, axis=1).repeat(factor, axis=2)
    count, height, width, channels = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    picture = np.full(
        (rows * (height + margin) + margin, columns * (width + margin) + margin, channels),
        255,
        np.uint8,
    )
    for index, image in enumerate(images):
        top = margin + index // columns * (height + margin)
        left = margin + index % columns * (width + margin)
        picture[top : top + height, left : left + width] = image
    return picture


def encode_png(picture: UInt8Array) -> bytes:
    """Encodes (height, width, 1 or 3) uint8 as a PNG file."""
    return bytes(tf.io.encode_png(picture).numpy())
