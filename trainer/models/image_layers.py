"""Provides faster convolutions of 4x4, stride 2, between images and wide layers, and random changes
of images.

On a CPU, oneDNN computes the gradient for such an image as if it had 16 channels. Over blocks of
2x2 pixels the same gradient is a convolution of stride 1, by a 2x2 kernel with four times the
channels, which takes a third of the time. A transposed convolution to an image is the same
computation. On a GPU, and where XLA compiles, both layers use Keras's own operations.

DiffAugment (Zhao et al. 2020, arxiv.org/abs/2006.10738) changes real and generated images right
before a critic sees them, and gradients flow through the changes to the generator: a critic cannot
memorize few examples, and a generator does not learn to make changed images. The random numbers are
functions of (seed, step, row). All shapes are static and nothing is gathered by index, so that XLA
compiles it well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from trainer.base.settings.model_settings import DIFF_AUGMENTATIONS
from trainer.invariance.internals import compiled_by_xla
from trainer.invariance.step import current_step

# A multiple of the stride, against checkerboards: Odena et al. 2016,
# https://distill.pub/2016/deconv-checkerboard
STRIDE = 2
CONVOLUTION = {"kernel_size": 4, "strides": STRIDE, "padding": "same"}


def _convolve(images: Any, kernel: Any) -> Any:
    """Convolves (rows, height, width, channels), of even sizes, to half the size; kernel: (4, 4,
    channels, filters)."""

    def gradient(upstream: Any) -> tuple[Any, Any]:
        return spread(upstream, kernel), _kernel_gradient(images, kernel, upstream)

    return tf.nn.conv2d(images, kernel, STRIDE, "SAME"), gradient


def _spread(features: Any, kernel: Any) -> Any:
    """Transposes `convolve`: from (rows, height, width, filters) to (rows, 2 height, 2 width,
    channels)."""

    def gradient(upstream: Any) -> tuple[Any, Any]:
        return convolve(upstream, kernel), _kernel_gradient(upstream, kernel, features)

    _, _, channels, filters = kernel.shape
    # (block row, row in it, block column, column in it, …) -> a 2x2 kernel of blocks.
    by_block = tf.transpose(tf.reshape(kernel, (2, 2, 2, 2, channels, filters)), (0, 2, 1, 3, 4, 5))
    _, height, width, _ = features.shape
    blocks = tf.raw_ops.Conv2DBackpropInput(
        input_sizes=tf.stack([tf.shape(features)[0], height + 1, width + 1, 4 * channels]),
        filter=tf.reshape(by_block, (2, 2, 4 * channels, filters)),
        out_backprop=features,
        strides=[1, 1, 1, 1],
        padding="VALID",
    )
    # without the border that "same" pads
    return tf.nn.depth_to_space(blocks, STRIDE)[:, 1:-1, 1:-1], gradient


def _kernel_gradient(images: Any, kernel: Any, upstream: Any) -> Any:
    return tf.raw_ops.Conv2DBackpropFilter(
        input=images,
        filter_sizes=kernel.shape,
        out_backprop=upstream,
        strides=[1, STRIDE, STRIDE, 1],
        padding="SAME",
    )


convolve = tf.custom_gradient(_convolve)
spread = tf.custom_gradient(_spread)


class ImageConv2D(layers.Conv2D):
    """Convolves images like Keras's Conv2D, by CONVOLUTION."""

    def convolution_op(self, inputs: Any, kernel: Any) -> Any:
        """Returns the convolution without bias and activation; Keras's `call` adds them."""
        return (
            super().convolution_op(inputs, kernel)
            if _use_keras()
            else convolve(inputs, tf.convert_to_tensor(kernel))
        )

    def plain(self) -> keras.layers.Layer:
        """Returns the layer that a template has instead."""
        return layers.Conv2D.from_config(self.get_config())


class ImageConv2DTranspose(layers.Conv2DTranspose):
    """Makes images like Keras's Conv2DTranspose, by CONVOLUTION."""

    def call(self, inputs: Any) -> Any:
        """Maps (rows, height, width, channels) to (rows, 2 height, 2 width, filters)."""
        if _use_keras():
            return super().call(inputs)
        images = spread(inputs, tf.convert_to_tensor(self.kernel))
        return self.activation(images + self.bias if self.use_bias else images)

    def plain(self) -> keras.layers.Layer:
        """Returns the layer that a template has instead."""
        return layers.Conv2DTranspose.from_config(self.get_config())


# not empty within `as_on_gpus`; a context variable would not reach the replicas' threads
_planned: list[None] = []


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Makes both layers use their operations for GPUs in what the block builds or traces."""
    _planned.append(None)
    try:
        yield
    finally:
        _planned.pop()


def prefers_many_rows() -> bool:
    """Returns whether one operation over many rows is faster than several, as on GPUs.

    On a CPU, the activations of few rows stay in its caches.
    """
    return bool(_planned or tf.config.get_visible_devices("GPU"))


def _use_keras() -> bool:
    return prefers_many_rows() or compiled_by_xla()


# The paper's: shifts of up to 1/8 of the size, and a square of half the size.
_SHIFT = 0.125
_CUT = 0.5


def color(images: Any, numbers: Any) -> Any:
    """Changes brightness by up to 0.5, then saturation by a factor in [0, 2), then contrast by one
    in [0.5, 1.5).

    images: (rows, height, width, channels) in [-1, 1]; numbers: (rows, 3) in [0, 1).
    """
    brightness, saturation, contrast = (
        number[:, None, None] for number in tf.split(numbers, 3, axis=1)
    )
    images += brightness - 0.5
    images = _about_mean(images, 2.0 * saturation, axes=(3,))
    return _about_mean(images, contrast + 0.5, axes=(1, 2, 3))


def translation(images: Any, numbers: Any) -> Any:
    """Shifts each square image by up to 1/8 of its size both ways; what comes in is grey, 0.
    numbers: (rows, 2)."""
    size = images.shape[1]
    most = int(_SHIFT * size + 0.5)
    first = _whole(numbers, 2 * most + 1) - most
    # Each number makes a matrix that shifts: a row has a single 1, or only zeros where the source
    # is outside the image.
    shifts = tf.one_hot(
        first[..., None] + tf.range(size, dtype=tf.int64), size, dtype=numbers.dtype
    )
    down, right = tf.unstack(shifts, axis=1)
    return tf.einsum("rhi,rijc,rwj->rhwc", down, images, right)


def cutout(images: Any, numbers: Any) -> Any:
    """Makes a square of half the size grey, at a centre anywhere in a square image. numbers: (rows,
    2)."""
    size = images.shape[1]
    length = int(_CUT * size + 0.5)
    position = tf.range(size, dtype=tf.int64)
    first = _whole(numbers, size + 1 - length % 2)[..., None] - length // 2
    rows, columns = tf.unstack((position >= first) & (position < first + length), axis=1)
    square = rows[:, :, None] & columns[:, None, :]
    return images * tf.cast(~square[..., None], images.dtype)


# By name: the function, and the random numbers that it takes for each row; in the order in which
# they are applied.
_BY_NAME: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "color": (color, 3),
    "translation": (translation, 2),
    "cutout": (cutout, 2),
}
assert tuple(_BY_NAME) == DIFF_AUGMENTATIONS


class DiffAugment:
    """Applies the augmentations of these names; without any, nothing is drawn."""

    def __init__(self, names: Sequence[str]) -> None:
        self._chosen = [change for name, change in _BY_NAME.items() if name in names]

    def draw(self, times: int = 1) -> Any:
        """Draws new random numbers for `times` images of each row of the current step.

        Returns (times x rows, numbers), all rows of the first image first; None without
        augmentations. Call it outside of functions that XLA compiles.
        """
        if not self._chosen:
            return None
        step = current_step()
        numbers = sum(count for _, count in self._chosen)
        drawn = step.uniform((times, numbers), stream=step.numbered("diff_augment"))
        return tf.reshape(tf.transpose(drawn, (1, 0, 2)), (-1, numbers))

    def __call__(self, images: Any, numbers: Any) -> Any:
        """Returns the images, (rows, height, width, channels), changed by `draw`'s numbers."""
        parts = tf.split(numbers, [count for _, count in self._chosen], axis=1)
        for (change, _), part in zip(self._chosen, parts, strict=True):
            images = change(images, part)
        return images


def _about_mean(images: Any, factor: Any, axes: tuple[int, ...]) -> Any:
    mean = tf.reduce_mean(images, axes, keepdims=True)
    return mean + factor * (images - mean)


def _whole(numbers: Any, count: int) -> Any:
    """Scales numbers in [0, 1) to whole numbers below `count`: int64, as TensorFlow places int32 on
    a GPU's host."""
    return tf.cast(tf.floor(numbers * count), tf.int64)
