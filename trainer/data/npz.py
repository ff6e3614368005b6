""".npz files: x_train, y_train, x_test, y_test as Keras names them, or images and labels."""

import zipfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.config import TrainConfig
from trainer.data.arrays import arrays_dataset
from trainer.data.dataset import Dataset
from trainer.errors import UserError

_NAMES = (("x_train", "images", "x"), ("y_train", "labels", "y"), ("x_test",), ("y_test",))


def load(config: TrainConfig, path: Path) -> Dataset:
    """The arrays of the file. Objects (pickles) in it are refused."""
    try:
        with np.load(path, allow_pickle=False) as content:
            found = [_first(content, names) for names in _NAMES]
            if found[0] is None:
                raise UserError(
                    f"data={path}: it holds {', '.join(content.files) or 'nothing'}: x_train or images is needed"
                )
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise UserError(f"data={path}: cannot be read as .npz: {' '.join(str(error).split())}") from None
    images, labels, test_images, test_labels = found
    assert images is not None
    return arrays_dataset(config, images, labels, test_images, test_labels)


def _first(content: "np.lib.npyio.NpzFile", names: tuple[str, ...]) -> npt.NDArray[np.generic] | None:
    for name in names:
        if name in content.files:
            array: npt.NDArray[np.generic] = content[name]
            return array
    return None
