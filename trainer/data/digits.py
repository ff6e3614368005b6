"""1,797 real handwritten digits that come with the package, so that a submitted job has them too.

Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, licence CC BY 4.0: its test part, the same that scikit-learn ships. digits.npz holds
`images` (1797, 8, 8) with grey levels 0 to 16 and `labels` (1797,), unchanged but for the file format.
"""

from pathlib import Path

import numpy as np
import tensorflow as tf

from trainer.config import TrainConfig
from trainer.data.dataset import Dataset

_FILE = Path(__file__).with_name("digits.npz")
_WHITE = 16


def load(config: TrainConfig) -> Dataset:
    """The digits, resized (bicubic) to image_size and repeated to `channels`, as uint8 grey levels."""
    with np.load(_FILE, allow_pickle=False) as content:
        small, labels = content["images"], content["labels"].astype(np.int32)
    levels = small[..., np.newaxis].astype(np.float32) * (255 / _WHITE)
    resized = tf.image.resize(levels, (config.image_size, config.image_size), method="bicubic", antialias=True)
    grey = np.clip(np.rint(resized.numpy()), 0, 255).astype(np.uint8)
    images = np.repeat(grey, config.channels, axis=-1)
    return Dataset("digits", images, labels, tuple(str(digit) for digit in range(10)))
