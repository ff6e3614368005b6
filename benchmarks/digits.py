"""The rows of the benchmarks, for every framework alike: the digits of the package in the size that a model takes."""

from pathlib import Path

import numpy as np
from PIL import Image

from trainer.config import TrainConfig

_DIGITS = Path(__file__).parents[1] / "trainer" / "data" / "digits.npz"


def write_digits(config: TrainConfig) -> None:
    """Writes the .npz file that `config.data` names: `images` (1797, size, size, channels) uint8, `labels` (1797,)."""
    with np.load(_DIGITS) as content:
        small, labels = (content["images"] * 15).astype(np.uint8), content["labels"].astype(np.int32)
    size = (config.image_size, config.image_size)
    grey = np.stack([np.asarray(Image.fromarray(image).resize(size)) for image in small])
    np.savez(config.data, images=np.repeat(grey[..., np.newaxis], config.channels, axis=-1), labels=labels)
