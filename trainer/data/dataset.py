"""Defines the dataset that every source returns: examples for training and evaluation, and their classes."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt
import tensorflow as tf

from trainer.errors import PlatformFault, UserError

Array = npt.NDArray[Any]

_failures: deque[Exception] = deque(maxlen=8)  # of reading, because TensorFlow passes on the text of errors only


class Examples(Protocol):
    """Provides images of one shape, by row number, with one label each or none."""

    @property
    def count(self) -> int:
        """Returns the number of examples."""
        ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Returns (height, width, channels)."""
        ...

    @property
    def labelled(self) -> bool:
        """Returns whether each example has a label."""
        ...

    def gather(self, rows: Any) -> tuple[Any, ...]:
        """Returns (images, labels), or (images,), of these rows, as TensorFlow operations.

        rows: an int32 tensor of any shape with numbers from 0 to below `count`. images: (*rows.shape, *image_shape), 0
        to 255, usually uint8; labels: rows.shape, int32, from 0 to below the number of classes.
        """
        ...


@runtime_checkable
class InOwnOrder(Protocol):
    """Provides examples with an order that the source determines, because it cannot access all of them at any time."""

    def permutation(self, seed: int, number: Any) -> Any:
        """Returns all row numbers, (count,) int32, in an order that depends on seed and number (an int64 tensor)."""
        ...


@dataclass(frozen=True)
class Arrays:
    """Holds examples in memory. Images keep the source's type (usually uint8 grey levels) until they reach the device.

    images: (examples, height, width, channels); labels: (examples,) integers from 0, or None.
    """

    images: Array
    labels: Array | None = None

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or not len(self.images):
            raise UserError(
                f"images of shape {self.images.shape}: must be (examples, height, width, channels), with at least one "
                "example"
            )
        if self.labels is not None and self.labels.shape != (len(self.images),):
            raise UserError(
                f"labels of shape {self.labels.shape} for {len(self.images)} images: one integer per image is required"
            )

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
        with tf.init_scope(), tf.device("CPU:0"):  # outside of any graph, so that all graphs share the tensors
            return tuple(tf.constant(part) for part in parts)


def gathered(
    read: Callable[[Any], tuple[Array, ...]], rows: Any, image_shape: tuple[int, int, int], labelled: bool
) -> tuple[Any, ...]:
    """Implements `Examples.gather` with `read`, which maps an array of row numbers to arrays of images and labels."""
    types = (tf.uint8, tf.int32)[: 1 + labelled]
    found = tf.numpy_function(partial(_recording_failures, read), [rows], types, stateful=False)
    parts = tf.nest.flatten(found)  # in eager mode a single output is not in a list
    parts[0].set_shape((*rows.shape, *image_shape))
    for labels in parts[1:]:
        labels.set_shape(rows.shape)
    return tuple(parts)


def _recording_failures(read: Callable[[Any], tuple[Array, ...]], rows: Any) -> tuple[Array, ...]:
    try:
        return read(rows)
    except (UserError, PlatformFault) as error:
        _failures.append(error)
        raise


@contextmanager
def failures_of_reading() -> Iterator[None]:
    """Restores a UserError or PlatformFault raised while reading, which TensorFlow turns into an UnknownError."""
    try:
        yield
    except tf.errors.OpError as error:
        cause = next((known for known in _failures if f"{type(known).__name__}: {known}"[:200] in str(error)), None)
        if cause is None:
            raise
        raise cause from error


@contextmanager
def closed_on_failure(close: Callable[[], object]) -> Iterator[None]:
    """Calls `close` if the block raises."""
    try:
        yield
    except BaseException:
        close()
        raise


@dataclass(frozen=True)
class Dataset:
    """Holds what a source returns. `notes` (what was converted or skipped) is written to run.json.

    `class_names` may be left empty for labels in Arrays: load_dataset then uses their numbers.
    """

    name: str
    train: Examples
    evaluation: Examples | None = None
    class_names: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None  # ends downloads in the background; nothing is read afterwards

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.train.image_shape
