"""Reads .npz files with x_train, y_train, x_test and y_test, the names of Keras, or with images and labels."""

import math
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.base.errors import UserError, reason
from trainer.base.settings.train_config import TrainConfig
from trainer.data.arrays import DEFLATE, MOST_BYTES, arrays_dataset
from trainer.data.dataset import Dataset

_NAMES = (("x_train", "images", "x"), ("y_train", "labels", "y"), ("x_test",), ("y_test",))
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def load(config: TrainConfig, path: Path) -> Dataset:
    """Returns the file's arrays. Raises UserError for pickled objects, and for headers that claim more than fits."""
    try:
        with zipfile.ZipFile(path) as content:
            members = content.namelist()
            arrays = [
                next((_read(content, f"{name}.npy", path) for name in names if f"{name}.npy" in members), None)
                for names in _NAMES
            ]
    except Exception as error:  # zipfile and numpy's header reader raise any exception for a damaged file
        raise UserError(f"data={path}: cannot be read as .npz: {reason(error)}") from None
    images, labels, test_images, test_labels = arrays
    if images is None:
        listed = ", ".join(name.removesuffix(".npy") for name in members[:20]) or "nothing"
        raise UserError(f"data={path}: it contains {listed}: x_train or images is required")
    return arrays_dataset(config, images, labels, test_images, test_labels)


def _read(content: zipfile.ZipFile, member: str, path: Path) -> npt.NDArray[np.generic]:
    """Reads one array of the file at `path`. Raises ValueError if its header claims more than fits."""
    info = content.getinfo(member)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member} has a compression that numpy does not write")
    with content.open(info) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"{member} has format {version}")
        shape, _, kind = _HEADERS[version](file)
    most = min(info.file_size, MOST_BYTES, DEFLATE * min(info.compress_size, path.stat().st_size))
    if not 0 <= math.prod(shape) * kind.itemsize <= most:
        raise ValueError(f"{member} claims {shape} of {kind}, more than it can hold")
    with content.open(info) as file:
        array: npt.NDArray[np.generic] = np.lib.format.read_array(file, allow_pickle=False)
    return array
