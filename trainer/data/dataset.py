"""The dataset object that every source gives: examples for training and for evaluation, and what they are."""

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

_failures: deque[Exception] = deque(maxlen=8)  # the newest of `read`: TensorFlow passes on their text alone


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
        """(images, labels), or (images,), of these rows, as TensorFlow operations.

        rows: an int32 tensor of any shape, numbers from 0 to below `count`. images: (*rows.shape, *image_shape), of any
        type, 0 to 255, uint8 as a rule; labels: rows.shape, int32, from 0 to below the number of classes.
        """
        ...


@runtime_checkable
class InOwnOrder(Protocol):
    """Examples that say themselves in which order an epoch takes them, because not all are at hand at any time."""

    def permutation(self, seed: int, number: Any) -> Any:
        """Every row number once, (count,) int32, the same for the same seed and number (an int64 tensor)."""
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
        """As Examples. TensorFlow refuses a row number out of range on a CPU, and gives zeros for it on a GPU."""
        return tuple(tf.gather(part, rows) for part in self._tensors)

    @cached_property
    def _tensors(self) -> tuple[Any, ...]:
        parts = (self.images,) if self.labels is None else (self.images, self.labels)
        with tf.init_scope(), tf.device("CPU:0"):  # once for all who gather, outside their graphs
            return tuple(tf.constant(part) for part in parts)


def gathered(
    read: Callable[[Any], tuple[Array, ...]], rows: Any, image_shape: tuple[int, int, int], labelled: bool
) -> tuple[Any, ...]:
    """`Examples.gather` of `read`, which takes row numbers and returns their images and labels, all as arrays."""
    types = (tf.uint8, tf.int32)[: 1 + labelled]
    found = tf.numpy_function(partial(_kept, read), [rows], types, stateful=False)
    parts = tf.nest.flatten(found)  # outside of graphs one part alone is not in a list
    parts[0].set_shape((*rows.shape, *image_shape))
    for labels in parts[1:]:
        labels.set_shape(rows.shape)
    return tuple(parts)


def _kept(read: Callable[[Any], tuple[Array, ...]], rows: Any) -> tuple[Array, ...]:
    try:
        return read(rows)
    except (UserError, PlatformFault) as error:
        _failures.append(error)
        raise


@contextmanager
def failures_of_reading() -> Iterator[None]:
    """Within it UserError and PlatformFault of a `read` stay what they are: TensorFlow makes UnknownError of both."""
    try:
        yield
    except tf.errors.OpError as error:
        cause = next((one for one in _failures if f"{type(one).__name__}: {one}"[:200] in str(error)), None)
        if cause is None:
            raise
        raise cause from error


@contextmanager
def closed_on_failure(close: Callable[[], object]) -> Iterator[None]:
    """Calls `close` where the block does not come to its end."""
    try:
        yield
    except BaseException:
        close()
        raise


@dataclass(frozen=True)
class Dataset:
    """What a source gives. `notes` goes to run.json: what was converted, left out, held back.

    Of a function of your own: `class_names` may be left out for labels in Arrays (load_dataset takes their numbers).
    """

    name: str
    train: Examples
    evaluation: Examples | None = None
    class_names: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None  # ends what is fetched ahead; nothing is read afterwards

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)"""
        return self.train.image_shape
