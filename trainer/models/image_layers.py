"""Provides faster convolutions of 4x4, stride 2, between images with few channels and wide layers.

On a CPU, oneDNN computes the gradient for such an image as if it had 16 channels. Over blocks of 2x2 pixels the same
sum is a 2x2 kernel of stride 1 with four times the channels, which takes a third of the time. A transposed convolution
to an image computes the same. On a GPU, and where XLA compiles, both layers use Keras's own operations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from trainer.invariance.compat import compiled_by_xla

# A multiple of the stride, against checkerboards: Odena et al. 2016, https://distill.pub/2016/deconv-checkerboard
KERNEL, STRIDE = 4, 2
_SHAPE = {"kernel_size": KERNEL, "strides": STRIDE, "padding": "same"}


def _convolve(images: Any, kernel: Any) -> Any:
    """Convolves (rows, height, width, channels), even sizes, by (4, 4, channels, filters) to half the size, "same"."""

    def gradient(upstream: Any) -> tuple[Any, Any]:
        return spread(upstream, kernel), _kernel_gradient(images, kernel, upstream)

    return tf.nn.conv2d(images, kernel, STRIDE, "SAME"), gradient


def _spread(features: Any, kernel: Any) -> Any:
    """Computes the adjoint of `convolve`: (rows, height, width, filters) to (rows, 2 height, 2 width, channels)."""

    def gradient(upstream: Any) -> tuple[Any, Any]:
        return convolve(upstream, kernel), _kernel_gradient(upstream, kernel, features)

    _, _, channels, filters = kernel.shape
    # (block row, row in it, block column, column in it, …) -> a 2x2 kernel of blocks.
    by_block = tf.transpose(tf.reshape(kernel, (2, 2, 2, 2, channels, filters)), (0, 2, 1, 3, 4, 5))
    _, height, width, _ = features.shape
    sizes = tf.stack([tf.shape(features)[0], height + 1, width + 1, 4 * channels])
    blocks = tf.raw_ops.Conv2DBackpropInput(
        input_sizes=sizes, filter=tf.reshape(by_block, (2, 2, 4 * channels, filters)), out_backprop=features,
        strides=[1, 1, 1, 1], padding="VALID",
    )  # fmt: skip
    return tf.nn.depth_to_space(blocks, STRIDE)[:, 1:-1, 1:-1], gradient  # without the border that "same" pads


def _kernel_gradient(images: Any, kernel: Any, upstream: Any) -> Any:
    return tf.raw_ops.Conv2DBackpropFilter(
        input=images, filter_sizes=kernel.shape, out_backprop=upstream, strides=[1, STRIDE, STRIDE, 1], padding="SAME"
    )


convolve, spread = tf.custom_gradient(_convolve), tf.custom_gradient(_spread)


class ImageConv2D(layers.Conv2D):
    """Convolves images like Keras's Conv2D of 4x4, stride 2, "same"."""

    def __init__(self, filters: int, **kwargs: Any) -> None:
        super().__init__(filters, **{**kwargs, **_SHAPE})

    def convolution_op(self, inputs: Any, kernel: Any) -> Any:
        """Returns the convolution without bias and activation; Keras's `call` adds them."""
        return super().convolution_op(inputs, kernel) if _as_keras() else convolve(inputs, tf.convert_to_tensor(kernel))

    def plain(self) -> keras.layers.Layer:
        """Returns the layer that a template has instead."""
        return layers.Conv2D.from_config(self.get_config())


class ImageConv2DTranspose(layers.Conv2DTranspose):
    """Makes images like Keras's Conv2DTranspose of 4x4, stride 2, "same"."""

    def __init__(self, filters: int, **kwargs: Any) -> None:
        super().__init__(filters, **{**kwargs, **_SHAPE})

    def call(self, inputs: Any) -> Any:
        """Maps (rows, height, width, channels) to (rows, 2 height, 2 width, filters)."""
        if _as_keras():
            return super().call(inputs)
        images = spread(inputs, tf.convert_to_tensor(self.kernel))
        return self.activation(images + self.bias if self.use_bias else images)

    def plain(self) -> keras.layers.Layer:
        """Returns the layer that a template has instead."""
        return layers.Conv2DTranspose.from_config(self.get_config())


_planned: list[None] = []  # not empty within `as_on_gpus`, in the threads of all replicas too


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Makes both layers use the operations that they use on GPUs, in what is built or traced within the block."""
    _planned.append(None)
    try:
        yield
    finally:
        _planned.pop()


def prefers_many_rows() -> bool:
    """Returns whether one operation over many rows is faster than several over few: on GPUs, which have to start each.

    On a CPU, the features of few rows stay in its caches.
    """
    return _has_gpu()


def _as_keras() -> bool:
    return _has_gpu() or compiled_by_xla()


def _has_gpu() -> bool:
    return bool(_planned or tf.config.get_visible_devices("GPU"))
