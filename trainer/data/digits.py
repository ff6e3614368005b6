"""Loads 1,797 real handwritten digits, which are part of the package so that a submitted job has them too.

Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, licence CC BY 4.0: its test part, the same that scikit-learn ships. digits.npz holds
`images` (1797, 8, 8) with grey levels 0 to 16 and `labels` (1797,), unchanged except for the file format.
"""

from pathlib import Path

import numpy as np

from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.image_arrays import arrays_dataset

_FILE = Path(__file__).with_name("digits.npz")
_WHITE = 16


def load(config: TrainConfig) -> Dataset:
    """Returns the digits, resized (bicubic) to image_size and repeated to `channels`, as uint8 grey levels."""
    with np.load(_FILE, allow_pickle=False) as content:
        small, labels = content["images"], content["labels"].astype(np.int32)
    return arrays_dataset(config, np.rint(small * (255 / _WHITE)).astype(np.uint8), labels)
