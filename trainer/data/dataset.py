"""The dataset object that every source gives: examples for training and for evaluation, and what they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy.typing as npt
import tensorflow as tf

from trainer.errors import UserError

Array = npt.NDArray[Any]


class Examples(Protocol):
    """Images of one shape, by row number, with one label each or none."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)"""
        ...

    @property
    def labelled(self) -> bool:
        """Whether each has a label."""
        ...

    def gather(self, rows: Any) -> tuple[Any, ...]:
        """(images, labels), or (images,), of these rows (int32 tensor of any shape), as TensorFlow operations."""
        ...


@dataclass(frozen=True)
class Arrays:
    """Examples in memory. Images stay as the source holds them (uint8 grey levels as a rule) until the device."""

    images: Array  # (examples, height, width, channels)
    labels: Array | None = None  # (examples,) whole numbers from 0, or None

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or not len(self.images):
            raise UserError(
                f"images of shape {self.images.shape}: at least one is needed, as (examples, height, width, channels)"
            )
        if self.labels is not None and self.labels.shape != (len(self.images),):
            raise UserError(f"labels of shape {self.labels.shape} for {len(self.images)} images: one number each")

    @property
    def count(self) -> int:
        return len(self.images)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        height, width, channels = self.images.shape[1:]
        return height, width, channels

    @property
    def labelled(self) -> bool:
        return self.labels is not None

    def gather(self, rows: Any) -> tuple[Any, ...]:
        return tuple(tf.gather(part, rows) for part in self._tensors)

    @cached_property
    def _tensors(self) -> tuple[Any, ...]:
        parts = (self.images,) if self.labels is None else (self.images, self.labels)
        with tf.init_scope(), tf.device("CPU:0"):  # once for all who gather, outside their graphs
            return tuple(tf.constant(part) for part in parts)


@dataclass(frozen=True)
class Dataset:
    """What a source gives. `notes` goes to run.json: what was converted, left out, held back."""

    name: str
    train: Examples
    evaluation: Examples | None = None
    class_names: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)"""
        return self.train.image_shape
