"""Makes datasets from arrays of images: the digits of the package, data sets of Keras, idx and .npz
files.

They are resized to the configured size and channels, and those for evaluation are split off.

The digits: 1,797 real handwritten ones, part of the package so that a submitted job has them too.
Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak (1998), UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0: its test part, the same that
scikit-learn ships. digits.npz holds `images` (1797, 8, 8) with grey levels 0 to 16 and `labels`
(1797,), unchanged except for the file format.
"""

import gzip
import math
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.examples import Arrays, Examples, Subset

MOST_CLASSES = 2**20
# So many pixels are resized at a time: float copies of all images would not fit into memory.
_CHUNK_PIXELS = 2**24


def arrays_dataset(
    config: TrainConfig,
    images: Any,
    labels: Any,
    test_images: Any = None,
    test_labels: Any = None,
    class_names: tuple[str, ...] = (),
) -> Dataset:
    """Returns a dataset of arrays, resized and converted to the settings.

    Raises UserError for invalid arrays.
    images: (examples, height, width) or (examples, height, width, channels) uint8; labels:
        (examples,) or (examples, 1) integers, or None. Without test arrays, `evaluation_fraction`
        of the examples is held back; without class names, `load_dataset` uses the labels' numbers.
    """
    train = _arrays(config, images, labels)
    evaluation = None if test_images is None else _arrays(config, test_images, test_labels)
    train, evaluation = with_evaluation(config, train, evaluation)
    return Dataset(config.data, train, evaluation, class_names)


def numbered_classes(labels: Iterable[int]) -> tuple[str, ...]:
    """Returns "0", "1" and so on up to the largest of the labels, as names of unnamed classes.

    It is () without labels.
    """
    return tuple(map(str, range(max(labels, default=-1) + 1)))


def with_evaluation(
    config: TrainConfig, train: Arrays, evaluation: Arrays | None
) -> tuple[Arrays, Arrays | None]:
    """Returns both parts.

    Without `evaluation`, holds back a copy of `evaluation_fraction` of `train` for it. Raises
    UserError if there are an evaluation part and the flag.
    """
    if not config.evaluation_fraction:
        return train, evaluation
    if evaluation is not None:
        raise UserError(
            f"evaluation_fraction={config.evaluation_fraction}: {config.data} already has an"
            f" evaluation part ({evaluation.count:,} examples): drop the flag"
        )
    parts = held_back(config, train)
    training, holdout = (train.take(np.sort(part.located(np.arange(part.count)))) for part in parts)
    return training, holdout


def held_back(config: TrainConfig, examples: Examples) -> tuple[Subset, Subset]:
    """Splits examples by the seed into those to train on and the `evaluation_fraction` to evaluate.

    Both are views.
    """
    count = examples.count
    holdout = round(count * config.evaluation_fraction)
    if not 0 < holdout < count:
        raise UserError(
            f"evaluation_fraction={config.evaluation_fraction} of {count} examples leaves one side"
            " empty"
        )
    train = Subset(examples, config.seed, holdout, count - holdout)
    return train, Subset(examples, config.seed, 0, holdout)


def _arrays(config: TrainConfig, images: Any, labels: Any) -> Arrays:
    """Returns images cropped to the middle square, resized to the settings, and their labels."""
    # Images must be uint8, with one or three channels.
    images = np.asarray(images)
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or not images.size or images.shape[-1] not in (1, 3):
        raise UserError(
            f"data={config.data}: images of shape {images.shape}: must be (examples, height, width)"
            " or (examples, height, width, 1 or 3), with at least one example"
        )
    if images.dtype != np.uint8:
        raise UserError(
            f"data={config.data}: images are {images.dtype}: must be uint8, grey levels from 0"
            " to 255"
        )

    # Grey levels are repeated for colours, and colours weighted by ITU-R 601, as Pillow does.
    size = config.image_size
    channels = config.channels
    if images.shape[-1] < channels:
        images = np.repeat(images, 3, axis=-1)
    elif images.shape[-1] > channels:
        grey = images @ np.array([299, 587, 114], np.int64)
        images = ((grey + 500) // 1000).astype(np.uint8)[..., np.newaxis]

    # The middle square is resized, bicubic.
    height, width = images.shape[1:3]
    side = min(height, width)
    top = (height - side) // 2
    left = (width - side) // 2
    images = np.ascontiguousarray(images[:, top : top + side, left : left + side])
    if side != size:

        def resized(part: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
            pixels = tf.image.resize(part, (size, size), method="bicubic", antialias=True)
            return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)

        chunks = math.ceil(len(images) * size * size * channels / _CHUNK_PIXELS)
        images = np.concatenate([resized(part) for part in np.array_split(images, chunks)])
    if labels is not None:
        labels = np.asarray(labels)
        labels = labels[:, 0] if labels.shape == (len(images), 1) else labels
    return Arrays(images, labels)


def checked_labels(
    labels: npt.NDArray[Any], origin: str, classes: int = MOST_CLASSES
) -> npt.NDArray[np.int32]:
    """Returns labels as int32.

    Raises UserError, naming `origin`, unless all are integers from 0 to below `classes`.
    """
    if labels.dtype.kind not in "iu":
        raise UserError(f"{origin}: labels of type {labels.dtype}: must be integers")
    least = labels.min()
    largest = labels.max()
    if not 0 <= least <= largest < classes:
        raise UserError(
            f"{origin}: labels from {least} to {largest}: must be from 0 to {classes - 1:,}"
        )
    return labels.astype(np.int32, copy=False)


def labelled(flags: Iterable[bool], origin: str, items: str) -> bool:
    """Returns whether `items` have labels.

    Raises UserError, naming `origin`, if only some of them have.
    """
    kinds = set(flags)
    if len(kinds) > 1:
        raise UserError(
            f"{origin}: some {items} have labels and some do not: label all of them, or none"
        )
    return kinds == {True}


_DIGITS = Path(__file__).with_name("digits.npz")
_WHITE_OF_DIGITS = 16


def load_digits(config: TrainConfig) -> Dataset:
    """Returns the digits of the package as uint8, in the size and channels of the settings."""
    with np.load(_DIGITS, allow_pickle=False) as content:
        small = content["images"]
        labels = content["labels"].astype(np.int32)
    grey = np.rint(small * (255 / _WHITE_OF_DIGITS)).astype(np.uint8)
    return arrays_dataset(config, grey, labels)


_CLASSES_OF_KERAS = {
    "fashion_mnist": "T-shirt Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Boot",
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck",
}


def load_keras(config: TrainConfig) -> Dataset:
    """Returns the data set of Keras that `config.data` names, from its cache or by download."""
    try:
        data_set = getattr(keras.datasets, config.data)
        (images, labels), (test_images, test_labels) = data_set.load_data()
    except Exception as error:  # of urllib, ssl, zipfile and others
        raise UserError(
            f"data={config.data}: download failed ({reason(error)}): use --data=FOLDER with the"
            " files"
        ) from None
    class_names = tuple(_CLASSES_OF_KERAS.get(config.data, "").split())
    return arrays_dataset(config, images, labels, test_images, test_labels, class_names)


_UINT8 = 0x08

# The first part of the file names: both `-` and `.` before `idx` are common.
_IDX_IMAGES = ("train-images", "t10k-images")
_IDX_LABELS = ("train-labels", "t10k-labels")


def is_idx(path: Path) -> bool:
    """Returns whether `path` is a folder of idx files, or one images file."""
    if path.is_dir():
        return any(_find_idx(path, name) for name in _IDX_IMAGES + _IDX_LABELS)
    return re.search("[-.]idx", path.name) is not None


def load_idx(config: TrainConfig, path: Path) -> Dataset:
    """Returns the dataset of a folder with train-* files, or of one file of images alone."""
    if not path.is_dir():
        return arrays_dataset(config, _read_idx(path, 3), None)
    image_files = [_find_idx(path, name) for name in _IDX_IMAGES]
    label_files = [_find_idx(path, name) for name in _IDX_LABELS]
    images, test_images = (file and _read_idx(file, 3) for file in image_files)
    labels, test_labels = (file and _read_idx(file, 1) for file in label_files)
    if images is None:
        raise UserError(f"data={path}: train-images-idx3-ubyte(.gz) not found in this folder")
    return arrays_dataset(config, images, labels, test_images, test_labels)


def _read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Reads an idx file of unsigned bytes with this many dimensions.

    Raises UserError if it is not one.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            header = file.read(4 + 4 * dimensions)
            if header[:4] != bytes((0, 0, _UINT8, dimensions)):
                raise UserError(
                    f"{path}: not an idx file of unsigned bytes in {dimensions} dimensions: its"
                    f" header is {header[:4].hex(' ')}"
                )
            begins = range(4, 4 + 4 * dimensions, 4)
            shape = tuple(int.from_bytes(header[begin : begin + 4], "big") for begin in begins)
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if len(content) != (size := math.prod(shape)):
        raise UserError(
            f"{path}: its header claims {shape}, but {'fewer' if len(content) < size else 'more'}"
            " bytes follow"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _find_idx(folder: Path, prefix: str) -> Path | None:
    names = (prefix, prefix.replace("-", "_"))
    paths = [path for path in folder.iterdir() if path.name.startswith(names) and path.is_file()]
    return min(paths, default=None)


_NPZ_NAMES = (("x_train", "images", "x"), ("y_train", "labels", "y"), ("x_test",), ("y_test",))


def load_npz(config: TrainConfig, path: Path) -> Dataset:
    """Returns the dataset in a .npz file.

    Raises UserError for pickled objects and damaged files.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as content:
            members = [*content.files]
            arrays: list[Any] = [
                next((content[name] for name in names if name in members), None)
                for names in _NPZ_NAMES
            ]
    # The readers of ZIP files and of NumPy's headers raise any exception for a damaged file.
    except Exception as error:
        raise UserError(f"data={path}: cannot be read as .npz: {reason(error)}") from None
    if arrays[0] is None:
        listed = ", ".join(members[:20]) or "nothing"
        raise UserError(f"data={path}: it contains {listed}: x_train or images is required")
    return arrays_dataset(config, *arrays)


def from_uint8(images: Any) -> Any:
    """Converts grey levels [0, 255] to [-1, 1], in the tensor's float type."""
    return images / 127.5 - 1.0


def to_uint8(images: Any) -> Any:
    """Converts [-1, 1] to uint8 grey levels, rounded to the nearest."""
    return tf.cast(tf.clip_by_value(tf.round((images + 1.0) * 127.5), 0.0, 255.0), tf.uint8)
