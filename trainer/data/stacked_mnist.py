"""Makes Stacked-MNIST: three handwritten digits are the colours of one image, so that there are 1,000 kinds of images.

Metz et al. 2017, https://arxiv.org/abs/1611.02163, and Srivastava et al. 2017, https://arxiv.org/abs/1705.07761, count
how many of them a GAN generates. Which digits meet does not depend on a run's seed: all runs have the same images.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.config.train_config import TrainConfig
from trainer.data import idx, keras_datasets
from trainer.data.arrays import arrays_dataset
from trainer.data.dataset import Dataset
from trainer.data.order import shuffled
from trainer.errors import UserError

_DIGITS = 10


def load(config: TrainConfig, path: Path) -> Dataset:
    """Returns the images made of the idx files in the folder `path`, as many as it has digits."""
    return _stacked(config, idx.read_parts(path))


def download(config: TrainConfig) -> Dataset:
    """Returns the images made of MNIST as Keras downloads it."""
    return _stacked(config, keras_datasets.read_parts("mnist"))


def _stacked(config: TrainConfig, parts: Sequence[Any]) -> Dataset:
    """Stacks images and labels of each part, given in turn; a label is its digits: 207 of red 2, green 0 and blue 7."""
    stacked: list[Any] = []
    for images, labels in zip(parts[::2], parts[1::2], strict=True):
        if images is None:
            stacked += [None, None]
            continue
        if labels is None or labels.shape != images.shape[:1] or labels.max() >= _DIGITS:
            raise UserError(f"data={config.data}: each image needs a label from 0 to {_DIGITS - 1}: use MNIST's files")
        rows = _rows(len(images))
        stacked += [np.moveaxis(images.reshape(images.shape[:3])[rows], 0, -1), labels[rows].T @ (100, 10, 1)]
    return arrays_dataset(config, *stacked)


def _rows(count: int) -> npt.NDArray[np.int64]:
    """Returns the rows of the digits in each channel, (3, count); every channel has each digit once."""
    return np.stack([shuffled(np.arange(count), count, 0, f"stacked_mnist {channel}") for channel in range(3)])
