"""Defines the dataset that every source returns: examples for training and evaluation, and their classes."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.data.nests import Nest, as_arrays, described, read_as_tensors, rows_in, specs_of
from trainer.data.order import Rows, shuffled
from trainer.errors import PlatformFault, UserError

Array = npt.NDArray[Any]

HELD_BACK = "held back"  # the name of the order by which rows are split into training and evaluation
_HEAD = 16  # rows of data in sequence that are looked at before training
_failures: deque[Exception] = deque(maxlen=8)  # of reading, because TensorFlow passes on the text of errors only


class Examples(Protocol):
    """Provides examples by row number. Those that are images also have `image_shape` (height, width, channels)."""

    @property
    def count(self) -> int:
        """Returns the number of examples."""
        ...

    def gather(self, rows: Any) -> tuple[Nest, ...]:
        """Returns (x,), (x, y) or (x, y, sample_weight) of these rows, as TensorFlow operations.

        rows: an integer tensor of any shape with numbers from 0 to below `count`. Each part is a nest of tensors, of
        shape (*rows.shape, *the shape of one example). Where the examples are images, x is (*rows.shape, height, width,
        channels), 0 to 255, usually uint8, and y, if any, is rows.shape, int32, from 0 to below the number of classes.
        """
        ...


class InSequence(ABC):
    """Provides examples in one fixed order, without access by row number."""

    has_length: bool = True  # else `count` is what the run reads
    spec: tuple[Nest, ...]  # the tf.TensorSpec of one example, in the structure of its parts

    @property
    @abstractmethod
    def count(self) -> int:
        """Returns the number of examples in one pass, which may have to be read for it."""

    @cached_property
    def head(self) -> tuple[Nest, ...]:
        """Returns the parts of the first rows, at most _HEAD, as arrays; they are read once."""
        parts = next(iter(self.batches(_HEAD, drop_remainder=False)))
        found: tuple[Nest, ...] = tf.nest.map_structure(lambda part: part.numpy(), parts)
        return found

    @abstractmethod
    def batches(self, size: int, *, drop_remainder: bool) -> tf.data.Dataset:
        """Returns one pass over the examples: parts with `size` rows each, the last one perhaps with fewer."""


@runtime_checkable
class InOwnOrder(Protocol):
    """Provides examples with an order that the source determines, because it cannot access all of them at any time."""

    def rows_at(self, seed: int, number: int, positions: Rows) -> Rows:
        """Returns the rows at these positions of an order that depends on seed and number, which has every row once.

        positions: (n,) from 0 to below `count`. Orders are asked for by ascending numbers.
        """
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
        with on_host():
            return tuple(tf.gather(part, rows) for part in self._tensors)

    @cached_property
    def _tensors(self) -> tuple[Any, ...]:
        return shared_tensors((self.images,) if self.labels is None else (self.images, self.labels))


class NestedArrays:
    """Holds examples of any shape in memory: x, y and sample_weight are arrays, or dicts, lists or tuples of them.

    Raises UserError if they have different numbers of rows, or are not numbers.
    """

    def __init__(self, x: Nest, y: Nest = None, sample_weight: Nest = None) -> None:
        given = {"x": x, "y": y, "sample_weight": sample_weight}
        arrays = {name: as_arrays(part, name) for name, part in given.items() if part is not None}
        self.parts = tuple(arrays.values())
        self.count = rows_in(self.parts)
        if y is None and sample_weight is not None:
            raise UserError("sample_weight without y: what has no targets has no loss to weight")
        for name, part in arrays.items():
            if name != "x" and (row := _first_not_finite(part)) is not None:
                raise UserError(f"{name} holds NaN or infinity, first in row {row:,}: remove or fill these rows")

    def gather(self, rows: Any) -> tuple[Nest, ...]:
        with on_host():
            parts: tuple[Nest, ...] = tf.nest.map_structure(lambda part: tf.gather(part, rows), self._tensors)
        return parts

    @cached_property
    def _tensors(self) -> Any:
        return shared_tensors(self.parts)


@dataclass(frozen=True)
class Subset:
    """Provides `count` rows of other examples: those from position `first` on of an order drawn by the seed."""

    examples: Examples
    seed: int
    first: int
    count: int

    def located(self, rows: Rows) -> Rows:
        """Returns the rows of `examples`, in the shape of `rows`."""
        return shuffled(rows.ravel() + self.first, self.examples.count, self.seed, HELD_BACK).reshape(rows.shape)

    def gather(self, rows: Any) -> tuple[Nest, ...]:
        with on_host():
            located = tf.numpy_function(self.located, [tf.cast(rows, tf.int64)], tf.int64, stateful=False)
            return self.examples.gather(tf.ensure_shape(located, rows.shape))


def on_host() -> Any:
    """Returns a context in which TensorFlow gathers in the host's memory: a GPU would first copy the whole data set."""
    return tf.device("CPU:0")


def shared_tensors(arrays: Nest) -> Nest:
    """Returns `arrays` as tensors on the host, outside of any graph, so that all graphs share them."""
    with tf.init_scope(), on_host():
        return tf.nest.map_structure(tf.constant, arrays)


def targets_in_memory(examples: "Examples | InSequence") -> Array | None:
    """Returns y if it is one array of integers in memory, else None."""
    if isinstance(examples, Subset):
        labels = targets_in_memory(examples.examples)
        return None if labels is None else labels[examples.located(np.arange(examples.count))]
    y = getattr(examples, "labels", None)
    if isinstance(examples, NestedArrays) and len(examples.parts) > 1:
        y = examples.parts[1]
    return y if isinstance(y, np.ndarray) and y.dtype.kind in "iu" else None


def first_unfit_input(examples: "Examples | InSequence") -> int | None:
    """Returns the first row of x in memory with NaN or infinity, else None. A model may mask them: no refusal."""
    examples = examples.examples if isinstance(examples, Subset) else examples
    return _first_not_finite(examples.parts[0]) if isinstance(examples, NestedArrays) else None


def _first_not_finite(part: Nest) -> int | None:
    """Returns the first row with NaN or infinity in an array of a nest, else None."""
    for leaf in tf.nest.flatten(part):
        if leaf.dtype.kind == "f" and not (finite := np.isfinite(leaf)).all():
            return int(np.flatnonzero(~finite.reshape(len(leaf), -1).all(axis=1))[0])
    return None


def image_spec(image_shape: tuple[int, int, int], labelled: bool) -> tuple[Any, ...]:
    """Returns the spec of one image, with its label if it has one."""
    return (tf.TensorSpec(image_shape, tf.uint8), tf.TensorSpec((), tf.int32))[: 1 + labelled]


def gathered(read: Callable[[Any], Nest], rows: Any, spec: Nest) -> tuple[Any, ...]:
    """Implements `Examples.gather` with `read`, which maps row numbers to arrays in the structure of `spec`.

    A UserError or PlatformFault that `read` raises is what `failures_of_reading` restores.
    """
    parts: tuple[Any, ...] = read_as_tensors(partial(_recording_failures, read), rows, spec)
    return parts


def first_rows(examples: "Examples | InSequence", count: int) -> tuple[Nest, ...]:
    """Returns the parts of the first rows, at most `count`, as arrays; by row number, they are read at each call."""
    with failures_of_reading():
        if isinstance(examples, InSequence):
            found: tuple[Nest, ...] = tf.nest.map_structure(lambda part: part[:count], examples.head)
        else:
            parts = examples.gather(tf.range(min(count, examples.count), dtype=tf.int64))
            found = tf.nest.map_structure(lambda part: part.numpy(), parts)
    return found


def _recording_failures(read: Callable[[Any], Nest], rows: Any) -> Nest:
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
    train: "Examples | InSequence"
    evaluation: "Examples | InSequence | None" = None
    class_names: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None  # ends downloads in the background; nothing is read afterwards

    @property
    def holds_images(self) -> bool:
        """Returns whether x are grey levels of images, which training and evaluation cast to floatx."""
        return hasattr(self.train, "image_shape")

    @property
    def unit(self) -> str:
        """Returns what examples are called."""
        return "images" if self.holds_images else "examples"

    @cached_property
    def spec(self) -> tuple[Nest, ...]:
        """Returns the tf.TensorSpec of one example: (x,), (x, y) or (x, y, sample_weight); reads one if it must."""
        if isinstance(self.train, InSequence):
            return self.train.spec
        spec: tuple[Nest, ...] = specs_of(first_rows(self.train, 1))
        return spec

    @property
    def labelled(self) -> bool:
        """Returns whether the examples have targets."""
        known = getattr(self.train, "labelled", None)
        return len(self.spec) > 1 if known is None else bool(known)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Returns (height, width, channels). Raises UserError if x is not an image."""
        if self.holds_images:
            shape: tuple[int, int, int] = self.train.image_shape  # type: ignore[union-attr]
            return shape
        x = self.spec[0]
        if tf.nest.is_nested(x) or len(x.shape) != 3:
            raise UserError(
                f"data={self.name}: an example is {described(x)}, not an image (height, width, channels): use a model "
                "of your own for it (--model=package.module:function)"
            )
        height, width, channels = x.shape
        return height, width, channels

    def images(self, split: str) -> Examples:
        """Returns the split "train" or "evaluation". Raises UserError if its examples are not images by row number."""
        examples = self.train if split == "train" else self.evaluation
        if not hasattr(examples, "image_shape"):
            raise UserError(
                f"data={self.name}: its examples are {self.shape}, not images of a source, which FID and "
                "prepared shards need"
            )
        images: Examples = examples  # type: ignore[assignment]
        return images

    @property
    def shape(self) -> str:
        """Describes one example for people: the size of an image, or the types and shapes of all parts."""
        if self.holds_images:
            return "x".join(map(str, self.image_shape))
        return " -> ".join(described(part) for part in self.spec)

    @property
    def input_spec(self) -> Nest:
        """Returns the tf.TensorSpec of a model's input, a nest as x is: any number of rows, images in floatx."""
        if self.holds_images:
            return tf.TensorSpec((None, *self.image_shape), keras.config.floatx(), name="images")
        return tf.nest.map_structure(lambda one: tf.TensorSpec((None, *one.shape), one.dtype), self.spec[0])

    def as_fit(self, parts: tuple[Nest, ...]) -> Any:
        """Returns what `fit` passes to train_step and test_step for these parts: x, (x, y) or (x, y, sample_weight)."""
        x, *others = parts
        if self.holds_images:
            x = tf.cast(x, keras.config.floatx())
        return (x, *others) if others or tf.nest.is_nested(x) else x

    def first_inputs(self, count: int) -> Any:
        """Returns x of the first training rows, at most `count`, as a model is called with it."""
        x = self.as_fit(tf.nest.map_structure(tf.convert_to_tensor, first_rows(self.train, count)[:1]))
        return x[0] if isinstance(x, tuple) else x
