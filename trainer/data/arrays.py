"""Arrays in memory -> the dataset that the settings ask for: size, channels, classes, an evaluation split."""

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.config.train_config import TrainConfig
from trainer.data.dataset import Array, Arrays, Dataset
from trainer.errors import UserError

MOST_BYTES = 16 * 2**30  # what a file may claim to hold
DEFLATE = 1032  # the most bytes that one compressed byte stands for: https://zlib.net/zlib_tech.html
MOST_CLASSES = 2**20  # a larger label is no class
_CHUNK_PIXELS = 2**24  # resized at a time: float copies of all images at once would not fit


def arrays_dataset(
    config: TrainConfig,
    images: Any,
    labels: Any,
    test_images: Any = None,
    test_labels: Any = None,
    class_names: tuple[str, ...] = (),
) -> Dataset:
    """A dataset of arrays, resized and converted to the settings.

    images: (examples, height, width) or (examples, height, width, channels) uint8; labels: (examples,) or
    (examples, 1) whole numbers, or None. Without test arrays, `evaluation_fraction` of the examples is held back;
    without class names `load_dataset` takes the labels' numbers. UserError where shapes or values do not fit.
    """
    train = _arrays(config, images, labels)
    evaluation = None if test_images is None else _arrays(config, test_images, test_labels)
    train, evaluation = with_evaluation(config, train, evaluation)
    return Dataset(config.data, train, evaluation, class_names)


def largest_label(*parts: Arrays | None) -> int:
    """Over all of `parts`; -1 where there are no labels."""
    return max((int(part.labels.max()) for part in parts if part and part.labels is not None), default=-1)


def numbered_classes(largest: int) -> tuple[str, ...]:
    """ "0", "1" and so on to the largest label, for classes without names; none for -1."""
    return tuple(str(label) for label in range(largest + 1))


def with_evaluation(config: TrainConfig, train: Arrays, evaluation: Arrays | None) -> tuple[Arrays, Arrays | None]:
    """The source's own two parts, or `evaluation_fraction` of the one held back; UserError where both are wanted."""
    if evaluation is None:
        return hold_back(config, train) if config.evaluation_fraction else (train, None)
    if config.evaluation_fraction:
        raise UserError(
            f"evaluation_fraction={config.evaluation_fraction}: {config.data} has an evaluation part of its own "
            f"({evaluation.count:,} examples): drop the flag"
        )
    return train, evaluation


def hold_back(config: TrainConfig, examples: Arrays) -> tuple[Arrays, Arrays]:
    """`examples` in two: for training, and `evaluation_fraction` of them, drawn by the seed, for evaluation."""
    order = np.random.default_rng(config.seed).permutation(examples.count)
    held = round(examples.count * config.evaluation_fraction)
    if not 0 < held < examples.count:
        raise UserError(
            f"evaluation_fraction={config.evaluation_fraction} of {examples.count} examples leaves one side empty"
        )

    def take(rows: npt.NDArray[Any]) -> Arrays:
        rows.sort()
        return Arrays(examples.images[rows], None if examples.labels is None else examples.labels[rows])

    return take(order[held:]), take(order[:held])


def fit(images: Array, size: int, channels: int) -> npt.NDArray[np.uint8]:
    """(examples, height, width, 1 or 3) uint8 -> (examples, size, size, channels): the middle square, bicubic."""
    images = _middle_square(_to_channels(images, channels))
    if images.shape[1] == size:
        return np.ascontiguousarray(images)
    result = np.empty((len(images), size, size, channels), np.uint8)
    chunk = max(1, _CHUNK_PIXELS // (size * size * channels))
    for first in range(0, len(images), chunk):
        some = images[first : first + chunk].astype(np.float32)
        resized = tf.image.resize(some, (size, size), method="bicubic", antialias=True).numpy()
        result[first : first + chunk] = np.clip(np.rint(resized), 0, 255)
    return result


def _arrays(config: TrainConfig, images: Any, labels: Any) -> Arrays:
    images = np.asarray(images)
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or not images.size or images.shape[-1] not in (1, 3):
        raise UserError(
            f"data={config.data}: images of shape {images.shape}: at least one is needed, as "
            "(examples, height, width) or (examples, height, width, 1 or 3)"
        )
    if images.dtype != np.uint8:
        raise UserError(f"data={config.data}: images are {images.dtype}: uint8 grey levels from 0 to 255 are needed")
    fitted = fit(images, config.image_size, config.channels)
    return Arrays(fitted, None if labels is None else _labels(config, labels, len(images)))


def _labels(config: TrainConfig, labels: Any, count: int) -> npt.NDArray[np.int32]:
    labels = np.asarray(labels)
    if labels.shape == (count, 1):
        labels = labels[:, 0]
    if labels.shape != (count,):
        raise UserError(
            f"data={config.data}: labels of shape {labels.shape} for {count} images: one whole number each is needed"
        )
    return checked_labels(labels, f"data={config.data}")


def checked_labels(labels: npt.NDArray[Any], origin: str, classes: int = MOST_CLASSES) -> npt.NDArray[np.int32]:
    """Labels as int32; UserError, naming `origin`, unless they are whole numbers from 0 to below `classes`."""
    if labels.dtype.kind not in "iu":
        raise UserError(f"{origin}: labels of type {labels.dtype}: whole numbers are needed")
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise UserError(
            f"{origin}: labels from {labels.min()} to {labels.max()}: they count from 0 to at most {classes - 1:,}"
        )
    return labels.astype(np.int32, copy=False)


def _to_channels(images: Array, channels: int) -> Array:
    if images.shape[-1] == channels:
        return images
    if channels == 3:
        return np.repeat(images, 3, axis=-1)
    grey = images @ np.array([299, 587, 114], np.int64)  # ITU-R 601, as Pillow weighs them
    return ((grey + 500) // 1000).astype(np.uint8)[..., np.newaxis]


def _middle_square(images: Array) -> Array:
    height, width = images.shape[1:3]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return images[:, top : top + side, left : left + side]
