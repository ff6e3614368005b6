"""Makes a dataset of images in memory, in the configured size and channels, and splits off those for evaluation."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.examples import Array, Examples, Subset
from trainer.data.in_memory import Arrays

MOST_CLASSES = 2**20
_CHUNK_PIXELS = 2**24  # resized at a time, because float copies of all images would not fit into memory


def arrays_dataset(
    config: TrainConfig,
    images: Any,
    labels: Any,
    test_images: Any = None,
    test_labels: Any = None,
    class_names: tuple[str, ...] = (),
) -> Dataset:
    """Returns a dataset of arrays, resized and converted to the settings. Raises UserError for invalid arrays.

    images: (examples, height, width) or (examples, height, width, channels) uint8; labels: (examples,) or
    (examples, 1) integers, or None. Without test arrays, `evaluation_fraction` of the examples is held back; without
    class names, `load_dataset` uses the labels' numbers.
    """
    train = _arrays(config, images, labels)
    evaluation = None if test_images is None else _arrays(config, test_images, test_labels)
    train, evaluation = with_evaluation(config, train, evaluation)
    return Dataset(config.data, train, evaluation, class_names)


def numbered_classes(labels: Iterable[int]) -> tuple[str, ...]:
    """Returns "0", "1" and so on up to the largest of the labels, as names of unnamed classes; () without labels."""
    return tuple(map(str, range(max(labels, default=-1) + 1)))


def with_evaluation(config: TrainConfig, train: Arrays, evaluation: Arrays | None) -> tuple[Arrays, Arrays | None]:
    """Returns images for both parts: without the second, `evaluation_fraction` of the first is held back, as a copy.

    Raises UserError for the flag beside a second part.
    """
    if evaluation is None and config.evaluation_fraction:
        rows = [part.located(np.arange(part.count)) for part in held_back(config, train)]
        return train.take(np.sort(rows[0])), train.take(np.sort(rows[1]))
    if evaluation is not None and config.evaluation_fraction:
        raise UserError(
            f"evaluation_fraction={config.evaluation_fraction}: {config.data} already has an evaluation part "
            f"({evaluation.count:,} examples): drop the flag"
        )
    return train, evaluation


def held_back(config: TrainConfig, examples: Examples) -> tuple[Subset, Subset]:
    """Returns views: examples to train on, and the `evaluation_fraction` to evaluate, drawn by the seed."""
    count = examples.count
    holdout = round(count * config.evaluation_fraction)
    if not 0 < holdout < count:
        raise UserError(f"evaluation_fraction={config.evaluation_fraction} of {count} examples leaves one side empty")
    return Subset(examples, config.seed, holdout, count - holdout), Subset(examples, config.seed, 0, holdout)


def fit(images: Array, size: int, channels: int) -> npt.NDArray[np.uint8]:
    """Crops images (examples, height, width, 1 or 3) to the middle square, resizes (bicubic) and sets the channels."""
    images = _middle_square(_to_channels(images, channels))
    if images.shape[1] == size:
        return np.ascontiguousarray(images)
    result = np.empty((len(images), size, size, channels), np.uint8)
    chunk = max(1, _CHUNK_PIXELS // (size * size * channels))
    for first in range(0, len(images), chunk):
        batch = images[first : first + chunk].astype(np.float32)
        resized = tf.image.resize(batch, (size, size), method="bicubic", antialias=True).numpy()
        result[first : first + chunk] = np.clip(np.rint(resized), 0, 255)
    return result


def _arrays(config: TrainConfig, images: Any, labels: Any) -> Arrays:
    images = np.asarray(images)
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or not images.size or images.shape[-1] not in (1, 3):
        raise UserError(
            f"data={config.data}: images of shape {images.shape}: must be (examples, height, width) or "
            "(examples, height, width, 1 or 3), with at least one example"
        )
    if images.dtype != np.uint8:
        raise UserError(f"data={config.data}: images are {images.dtype}: must be uint8, grey levels from 0 to 255")
    fitted = fit(images, config.image_size, config.channels)
    if labels is None:
        return Arrays(fitted)
    labels = np.asarray(labels)
    labels = labels[:, 0] if labels.shape == (len(images), 1) else labels
    return Arrays(fitted, checked_labels(labels, f"data={config.data}"))


def checked_labels(labels: npt.NDArray[Any], origin: str, classes: int = MOST_CLASSES) -> npt.NDArray[np.int32]:
    """Returns labels as int32. Raises UserError, naming `origin`, unless all are integers from 0 to below `classes`."""
    if labels.dtype.kind not in "iu":
        raise UserError(f"{origin}: labels of type {labels.dtype}: must be integers")
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise UserError(f"{origin}: labels from {labels.min()} to {labels.max()}: must be from 0 to {classes - 1:,}")
    return labels.astype(np.int32, copy=False)


def labelled(flags: Iterable[bool], origin: str, items: str) -> bool:
    """Returns whether `items` have labels. Raises UserError, naming `origin`, if only some of them have."""
    kinds = set(flags)
    if len(kinds) > 1:
        raise UserError(f"{origin}: some {items} have labels and some do not: label all of them, or none")
    return kinds == {True}


def _to_channels(images: Array, channels: int) -> Array:
    if images.shape[-1] == channels:
        return images
    if channels == 3:
        return np.repeat(images, 3, axis=-1)
    grey = images @ np.array([299, 587, 114], np.int64)  # ITU-R 601, the weights of Pillow
    return ((grey + 500) // 1000).astype(np.uint8)[..., np.newaxis]


def _middle_square(images: Array) -> Array:
    height, width = images.shape[1:3]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return images[:, top : top + side, left : left + side]
