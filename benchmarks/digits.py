"""The rows of the benchmarks, for every framework alike: the digits of the package in the size that a model takes."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from trainer.config.recipe import resolve
from trainer.config.train_config import TrainConfig

_DIGITS = Path(__file__).parents[1] / "trainer" / "data" / "digits.npz"


@contextmanager
def on_digits(flags: Sequence[str]) -> Iterator[tuple[TrainConfig, list[str]]]:
    """Settings, and flags that name a file of digits for them: it stays within the block."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, f"--data={Path(folder) / 'digits.npz'}"]
        config = resolve(flags).config
        write_digits(config)
        yield config, flags


def write_digits(config: TrainConfig) -> None:
    """Writes the .npz file that `config.data` names: `images` (1797, size, size, channels) uint8, `labels` (1797,)."""
    with np.load(_DIGITS) as content:
        small, labels = (content["images"] * 15).astype(np.uint8), content["labels"].astype(np.int32)
    size = (config.image_size, config.image_size)
    grey = np.stack([np.asarray(Image.fromarray(image).resize(size)) for image in small])
    np.savez(config.data, images=np.repeat(grey[..., np.newaxis], config.channels, axis=-1), labels=labels)


def images_a_step(config: TrainConfig) -> int:
    """Real images that a step reads."""
    return config.global_batch_size * (config.critic_steps if config.model == "wgan_gp" else 1)
