"""Reads idx files, the format of MNIST and Fashion-MNIST: http://yann.lecun.com/exdb/mnist (plain or .gz)."""

import gzip
import math
import re
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.image_arrays import arrays_dataset

_UINT8 = 0x08

# How the names of images and labels begin, because both `-` and `.` before `idx` are common.
_IMAGES, _LABELS = ("train-images", "t10k-images"), ("train-labels", "t10k-labels")


def is_idx(path: Path) -> bool:
    """Returns whether `path` is a folder of idx files, or one images file."""
    if path.is_dir():
        return any(_find(path, name) for name in _IMAGES + _LABELS)
    return re.search("[-.]idx", path.name) is not None


def load(config: TrainConfig, path: Path) -> Dataset:
    """Returns train-images and train-labels, with t10k-* for evaluation; or one images file, without labels."""
    if not path.is_dir():
        return arrays_dataset(config, _read(path, 3), None)
    images, test_images = (file and _read(file, 3) for file in (_find(path, name) for name in _IMAGES))
    labels, test_labels = (file and _read(file, 1) for file in (_find(path, name) for name in _LABELS))
    if images is None:
        raise UserError(f"data={path}: train-images-idx3-ubyte(.gz) not found in this folder")
    return arrays_dataset(config, images, labels, test_images, test_labels)


def _read(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Reads an idx file of unsigned bytes with this many dimensions. Raises UserError if it is damaged or differs."""
    try:
        with _open(path) as file:
            header = file.read(4 + 4 * dimensions)
            if len(header) < 4 + 4 * dimensions or header[:2] != b"\0\0" or header[2] != _UINT8:
                raise UserError(f"{path}: not an idx file of unsigned bytes: its header is {header[:4].hex(' ')}")
            if header[3] != dimensions:
                raise UserError(f"{path}: an idx file of {header[3]} dimensions, but {dimensions} are required")
            shape = tuple(int.from_bytes(header[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if len(content) != (size := math.prod(shape)):
        raise UserError(
            f"{path}: its header claims {shape}, but {'fewer' if len(content) < size else 'more'} bytes follow"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def _find(folder: Path, begins: str) -> Path | None:
    names = (begins, begins.replace("-", "_"))
    files = (path for path in folder.iterdir() if path.name.startswith(names) and path.is_file())
    return min(files, default=None)
