"""Defines the two kinds of examples: by row number, as most are, and in one fixed sequence (in_sequence.py)."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.errors import PlatformFault, UserError
from trainer.data.nests import Nest, specs_of
from trainer.data.order import RowNumbers, shuffled

Array = npt.NDArray[Any]

HELD_BACK = "held back"  # the name of the order by which rows are split into training and evaluation
FIRST_ROWS = 8  # of a fingerprint
SAMPLE_BYTES = 32 * 2**20  # read for a fingerprint, if the examples are not in memory
_BOUNDARY = 64  # of TensorFlow's tensors, in bytes


class AnyExamples(ABC):
    """Provides examples, each of which is x, (x, y) or (x, y, sample_weight); describes what both kinds share."""

    count: int  # the number of examples in one pass
    image_shape: tuple[int, int, int] | None = None  # (height, width, channels), if x are grey levels of images
    arrays: tuple[Nest, ...] = ()  # the parts of all examples, if they are in memory
    has_length = True  # else `count` is what the run reads
    _failure: Exception | None = None

    @property
    def failure(self) -> Exception | None:
        """Returns the exception that reading has raised: TensorFlow passes on no more than its text."""
        return self._failure

    @property
    @abstractmethod
    def spec(self) -> tuple[Nest, ...]:
        """Returns the tf.TensorSpec of one example, in the structure of its parts."""

    @property
    def targets(self) -> Array | None:
        """Returns y of all rows if it is one array of integers in memory, else None."""
        return None

    @property
    def labelled(self) -> bool:
        """Returns whether the examples have targets."""
        return len(self.spec) > 1

    @abstractmethod
    def first(self, count: int) -> tuple[Nest, ...]:
        """Returns the parts of the first rows, at most `count`, as arrays; those with numbers are read again."""

    @abstractmethod
    def in_order(self, size: int, takers: int = 1, taker: int = 0) -> tf.data.Dataset:
        """Returns every `takers`-th batch of `size` rows, from number `taker` on; the last one may be smaller."""

    def fingerprint(self) -> str:
        """Returns a text that changes with the content of the examples, and with nothing else: a digest of some."""
        digest = hashlib.sha256()
        for array in self.sample():
            digest.update(f"{array.dtype} {array.shape[1:]}\n".encode())
            if array.dtype == object:
                digest.update(b"\0".join(tf.compat.as_bytes(text) for text in array.flat))
            else:
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()[:32]

    @abstractmethod
    def sample(self) -> Iterable[Array]:
        """Returns the arrays of a fingerprint: of all rows or of some, the same at each call."""


class Examples(AnyExamples):
    """Provides examples by row number. A class of a user's that derives from it needs `count` and `gather`."""

    threads = 2  # that read the rows of steps to come
    sampled_rows = 1024  # at most, for a fingerprint
    ends_epochs = False  # whether all rows of an epoch must be read before the order of the next one is asked for

    @abstractmethod
    def gather(self, rows: Any) -> tuple[Nest, ...]:
        """Returns (x,), (x, y) or (x, y, sample_weight) of these rows, as TensorFlow operations.

        rows: an integer tensor of any shape with numbers from 0 to below `count`. Each part is a nest of tensors, of
        shape (*rows.shape, *the shape of one example). Where the examples are images, x is (*rows.shape, height, width,
        channels), 0 to 255, usually uint8, and y, if any, is rows.shape, int32, from 0 to below the number of classes.
        """

    @cached_property
    def spec(self) -> tuple[Nest, ...]:
        """Returns the tf.TensorSpec of one example; reads one for it."""
        spec: tuple[Nest, ...] = specs_of(self.first(1))
        return spec

    def order(self, seed: int, passes: RowNumbers, positions: RowNumbers) -> RowNumbers:
        """Returns the rows at these positions of passes, in each of which every row is once.

        It is a function of seed and pass. passes: (n,), ascending from 0; positions: (n,), from 0 to below `count`.
        """
        return shuffled(positions, self.count, seed, "order", passes)

    def first(self, count: int) -> tuple[Nest, ...]:
        return as_numpy(self.gather(tf.range(min(count, self.count), dtype=tf.int64)))

    def in_order(self, size: int, takers: int = 1, taker: int = 0) -> tf.data.Dataset:
        def batch(number: Any) -> Any:
            return self.gather(tf.range(number * size, tf.minimum((number + 1) * size, self.count), dtype=tf.int64))

        numbers = tf.data.Dataset.range(math.ceil(self.count / size)).shard(takers, taker)
        return numbers.map(batch, num_parallel_calls=2, deterministic=True).prefetch(2)

    def sample(self) -> Iterable[Array]:
        row_bytes = max(1, sum(array.nbytes for array in self._arrays(np.zeros(1, np.int64))))
        most = max(FIRST_ROWS, min(self.sampled_rows, SAMPLE_BYTES // row_bytes))
        rows = np.arange(min(FIRST_ROWS, self.count))
        if self.count > len(rows):
            keyed = np.random.default_rng(self.count).integers(0, self.count, most)
            rows = np.unique(np.concatenate([rows, keyed]))
        return self._arrays(rows)

    def _arrays(self, rows: RowNumbers) -> list[Array]:
        return [np.asarray(array) for array in tf.nest.flatten(self.gather(rows))]

    def read_by(self, read: Callable[[RowNumbers], Nest], rows: Any) -> tuple[Nest, ...]:
        """Implements `gather` with `read`, which maps an array of row numbers to arrays in the structure of `spec`.

        A UserError or PlatformFault that `read` raises is kept in `failure`.
        """

        def leaves(numbers: RowNumbers) -> list[Array]:
            try:
                return list(tf.nest.flatten(read(numbers)))
            except (UserError, PlatformFault) as error:
                self._failure = error
                raise

        specs = tf.nest.flatten(self.spec)
        reading = tf.autograph.experimental.do_not_convert(leaves)
        tensors = tf.numpy_function(reading, [rows], [spec.dtype for spec in specs], stateful=False)
        tensors = tf.nest.flatten(tensors)  # in eager mode a single output is not in a list
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape((*rows.shape, *spec.shape))
        parts: tuple[Nest, ...] = tf.nest.pack_sequence_as(self.spec, tensors)
        return parts


class Subset(Examples):
    """Provides `count` rows of other examples: those from position `first_position` on of an order by the seed."""

    def __init__(self, examples: Examples, seed: int, first_position: int, count: int) -> None:
        self._examples, self._seed, self._first, self.count = examples, seed, first_position, count
        self.arrays, self.threads, self.image_shape = examples.arrays, examples.threads, examples.image_shape

    @property
    def failure(self) -> Exception | None:
        return self._examples.failure

    @property
    def spec(self) -> tuple[Nest, ...]:
        return self._examples.spec

    @property
    def targets(self) -> Array | None:
        targets = self._examples.targets
        return None if targets is None else targets[self.located(np.arange(self.count))]

    def located(self, rows: RowNumbers) -> RowNumbers:
        """Returns the numbers that these rows have in the other examples, in the shape of `rows`."""
        positions = rows.ravel() + self._first
        return shuffled(positions, self._examples.count, self._seed, HELD_BACK).reshape(rows.shape)

    def sample(self) -> Iterable[Array]:
        return self._examples.sample() if self.arrays else super().sample()

    def gather(self, rows: Any) -> tuple[Nest, ...]:
        with on_host():
            located = tf.numpy_function(self.located, [tf.cast(rows, tf.int64)], tf.int64, stateful=False)
            return self._examples.gather(tf.ensure_shape(located, rows.shape))


def unfilled(shape: Sequence[int], dtype: Any) -> Array:
    """Returns an array for `read_by`, whose content is yet to be written.

    TensorFlow takes over an array that begins at a boundary of 64 bytes; any other it copies under Python's lock.
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        return np.empty(shape, kind)
    size = math.prod(shape) * kind.itemsize
    memory = np.empty(size + _BOUNDARY, np.uint8)
    start = -memory.ctypes.data % _BOUNDARY
    return memory[start : start + size].view(kind).reshape(shape)


def as_numpy(parts: tuple[Nest, ...]) -> tuple[Nest, ...]:
    """Returns tensors as arrays, in the same structure."""
    arrays: tuple[Nest, ...] = tf.nest.map_structure(lambda part: part.numpy(), parts)
    return arrays


def on_host() -> Any:
    """Returns a context in which TensorFlow gathers in the host's memory: a GPU would first copy the whole data set."""
    return tf.device("CPU:0")
