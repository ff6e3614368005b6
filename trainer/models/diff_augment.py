"""Changes images at random right before a critic sees them: DiffAugment, Zhao et al. 2020, arxiv.org/abs/2006.10738.

Real and generated images are changed alike, and gradients flow through the changes to the generator, so that a critic
cannot learn few examples by heart, and no generator learns to make changed images. The numbers are functions of (seed,
step, row). All shapes are static and nothing is gathered by index, so that XLA compiles it well.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer.invariance.step import current_step
from trainer.models.model_settings import DIFF_AUGMENTATIONS

# The paper's: shifts of up to 1/8 of the size, and a square of half the size.
_SHIFT, _CUT = 0.125, 0.5


def color(images: Any, numbers: Any) -> Any:
    """Changes brightness by up to 0.5, then saturation by a factor in [0, 2), then contrast by one in [0.5, 1.5).

    images: (rows, height, width, channels) in [-1, 1]; numbers: (rows, 3) in [0, 1).
    """
    brightness, saturation, contrast = (number[:, None, None] for number in tf.split(numbers, 3, axis=1))
    images += brightness - 0.5
    images = _about_mean(images, 2.0 * saturation, axes=(3,))
    return _about_mean(images, contrast + 0.5, axes=(1, 2, 3))


def translation(images: Any, numbers: Any) -> Any:
    """Shifts each square image by up to 1/8 of its size both ways; what comes in is grey, 0. numbers: (rows, 2)."""
    down, right = tf.unstack(_moved(images.shape[1], numbers), axis=1)
    return tf.einsum("rhi,rijc,rwj->rhwc", down, images, right)


def cutout(images: Any, numbers: Any) -> Any:
    """Makes a square of half the size grey, at a centre anywhere in a square image. numbers: (rows, 2)."""
    rows, columns = tf.unstack(_cut(images.shape[1], numbers), axis=1)
    square = rows[:, :, None] & columns[:, None, :]
    return images * tf.cast(~square[..., None], images.dtype)


# Each with the numbers that it takes of a row, in the order in which they are applied.
_BY_NAME: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "color": (color, 3),
    "translation": (translation, 2),
    "cutout": (cutout, 2),
}
assert tuple(_BY_NAME) == DIFF_AUGMENTATIONS


class DiffAugment:
    """Applies the augmentations of these names; with none, images stay as they are and nothing is drawn."""

    def __init__(self, names: Sequence[str]) -> None:
        self._chosen = [change for name, change in _BY_NAME.items() if name in names]

    def draw(self, times: int = 1) -> Any:
        """Returns numbers for `times` images of each row of the current step, other ones at each call.

        (times x rows, numbers), those of all rows one after the other; None without augmentations. Call it outside of
        functions that XLA compiles.
        """
        if not self._chosen:
            return None
        step, numbers = current_step(), sum(count for _, count in self._chosen)
        drawn = step.uniform((times, numbers), stream=step.numbered("diff_augment"))
        return tf.reshape(tf.transpose(drawn, (1, 0, 2)), (-1, numbers))

    def __call__(self, images: Any, numbers: Any) -> Any:
        """Returns the images, (rows, height, width, channels), changed by the `numbers` that `draw` returned."""
        if numbers is None:
            return images
        parts = tf.split(numbers, [count for _, count in self._chosen], axis=1)
        for (change, _), part in zip(self._chosen, parts, strict=True):
            images = change(images, part)
        return images


def _about_mean(images: Any, factor: Any, axes: tuple[int, ...]) -> Any:
    mean = tf.reduce_mean(images, axes, keepdims=True)
    return mean + factor * (images - mean)


def _whole(numbers: Any, count: int) -> Any:
    """Returns the numbers in [0, 1) as whole ones below `count`: not int32, with which GPUs compute on the host."""
    return tf.cast(tf.floor(numbers * count), tf.int64)


def _moved(size: int, numbers: Any) -> Any:
    """Returns a matrix for each number, (rows, 2, size, size), that shifts: each of its sums has at most one term."""
    most = int(_SHIFT * size + 0.5)
    first = _whole(numbers, 2 * most + 1) - most
    # What is out of range is 0 everywhere.
    return tf.one_hot(first[..., None] + tf.range(size, dtype=tf.int64), size, dtype=numbers.dtype)


def _cut(size: int, numbers: Any) -> Any:
    """Returns which positions are cut out for each number, (rows, 2, size)."""
    length = int(_CUT * size + 0.5)
    first = _whole(numbers, size + 1 - length % 2)[..., None] - length // 2
    position = tf.range(size, dtype=tf.int64)
    return (position >= first) & (position < first + length)
