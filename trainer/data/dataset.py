"""The dataset object that every source gives: images in memory, their labels, their classes."""

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from trainer.config import DATA_SOURCES, TrainConfig
from trainer.errors import UserError
from trainer.imports import load_function

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Dataset:
    """Examples in memory. Images stay as the source holds them (uint8 grey levels as a rule) until the device."""

    name: str
    images: Array  # (examples, height, width, channels)
    labels: Array | None = None  # (examples,) whole numbers, or None
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or not len(self.images):
            raise UserError(
                f"data={self.name}: images of shape {self.images.shape}: at least one is needed, as "
                "(examples, height, width, channels)"
            )
        if self.labels is not None and self.labels.shape != (len(self.images),):
            raise UserError(
                f"data={self.name}: labels of shape {self.labels.shape} for {len(self.images)} images: one number each"
            )

    @property
    def examples(self) -> int:
        return len(self.images)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)"""
        height, width, channels = self.images.shape[1:]
        return height, width, channels


def load_dataset(config: TrainConfig) -> Dataset:
    """The dataset that `config.data` names; UserError where it does not fit the settings."""
    dataset = load_function(DATA_SOURCES.get(config.data, config.data), "data")(config)
    if not isinstance(dataset, Dataset):
        raise UserError(f"data={config.data}: it returned {type(dataset).__name__}, not a trainer.data.dataset.Dataset")
    expected = (config.image_size, config.image_size, config.channels)
    if dataset.image_shape != expected:
        raise UserError(f"data={config.data}: images are {dataset.image_shape}, the settings say {expected}")
    if dataset.examples < config.global_batch_size:
        raise UserError(
            f"data={config.data}: {dataset.examples} examples are fewer than global_batch_size="
            f"{config.global_batch_size}: take at most {dataset.examples}"
        )
    return dataset
