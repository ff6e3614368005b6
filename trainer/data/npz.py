"""Reads .npz files with x_train, y_train, x_test and y_test, the names of Keras, or with images and labels."""

from pathlib import Path

import numpy as np

from trainer.base.errors import UserError, reason
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.image_arrays import arrays_dataset

_NAMES = (("x_train", "images", "x"), ("y_train", "labels", "y"), ("x_test",), ("y_test",))


def load(config: TrainConfig, path: Path) -> Dataset:
    """Returns the file's arrays. Raises UserError for pickled objects and damaged files."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as content:
            members = [*content.files]
            arrays = [next((content[name] for name in names if name in members), None) for names in _NAMES]
    except Exception as error:  # zipfile and numpy's header reader raise any exception for a damaged file
        raise UserError(f"data={path}: cannot be read as .npz: {reason(error)}") from None
    images, labels, test_images, test_labels = arrays
    if images is None:
        listed = ", ".join(members[:20]) or "nothing"
        raise UserError(f"data={path}: it contains {listed}: x_train or images is required")
    return arrays_dataset(config, images, labels, test_images, test_labels)
