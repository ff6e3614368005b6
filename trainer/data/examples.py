"""Defines examples: nests of arrays with rows in axis 0, read by row number or in one fixed
sequence.

A nest, as `fit` takes them, is an array, or dicts, lists and tuples of arrays. Most examples are
read by row number, from memory, files or a user's object; a tf.data.Dataset, which has no row
numbers, in its own order. `batches.py` reads both kinds. Examples that these classes accept have
leaves of one length, in types that `fit` would pass.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.errors import PlatformFault, UserError, shortened
from trainer.data.order import RowNumbers, shuffled
from trainer.invariance.internals import makes_batches

Nest = Any
Parts = Any  # a tuple of nests: (x,), (x, y) or (x, y, sample_weight)
Array = npt.NDArray[Any]
PARTS = ("x", "y", "sample_weight")

# It names the random order that splits rows into training and evaluation.
HELD_BACK = "held back"
_FIRST_ROWS = 8  # rows that each fingerprint reads
HEAD_ROWS = 16  # rows of a sequence that are read twice and compared before training
_SAMPLED_ROWS = 1024  # the most rows of a sequence that a fingerprint reads
SAMPLE_BYTES = 32 * 2**20  # the most that a fingerprint reads of examples that are not in memory
WHOLE_BYTES = 2 * 2**30  # arrays up to this size are fingerprinted whole, within a second
HOST = "CPU:0"  # where TensorFlow gathers rows: a GPU would first copy the whole data set
_ALIGNMENT = 64  # of TensorFlow's tensors, in bytes


def is_array(value: Any) -> bool:
    """Returns whether NumPy reads `value` as one array.

    It does if `value` has `__array__`, is a number, or is a list of numbers.
    """
    if isinstance(value, list):
        return bool(value) and all(map(np.isscalar, value))
    return hasattr(value, "__array__") or np.isscalar(value)


def parts_of(parts: Sequence[Nest]) -> Parts:
    """Returns x, y and sample_weight, as many as there are, with arrays as leaves.

    Raises UserError for other parts.
    """
    if not 1 <= len(parts) <= len(PARTS):
        raise UserError(f"{len(parts)} parts: return x, (x, y) or (x, y, sample_weight)")
    return tuple(_as_arrays(part, name) for part, name in zip(parts, PARTS, strict=False))


def _as_arrays(value: Nest, name: str) -> Nest:
    """Returns `value` with every leaf as an array of a type that `fit` would pass.

    Raises UserError, naming the leaf. Floating-point numbers become floatx, all others stay as they
    are; text, in x alone, is an array of objects. `name`: what the leaves are called in errors, as
    "x".
    """
    # A dict, list or tuple is a nest, whose leaves must be arrays.
    if isinstance(value, list) and value and isinstance(value[0], list):
        raise UserError(
            f"{name} is a list of lists: use np.array(…) for the rows of one input, or a tuple of"
            " arrays for several inputs"
        )
    if isinstance(value, dict):
        return {key: _as_arrays(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple) and not is_array(value):
        return tuple(_as_arrays(item, f"{name}[{number}]") for number, item in enumerate(value))
    if not is_array(value):
        raise UserError(
            f"{name} is of type {type(value).__name__}: it must be an array, or a dict, list or"
            " tuple of arrays, as by .to_tensor() of a RaggedTensor, or tf.sparse.to_dense"
        )
    if np.ma.is_masked(value):
        raise UserError(
            f"{name} is a masked array, whose masked values would be trained on: fill them by"
            " .filled(…)"
        )

    # An array of numbers, or of text in x, is taken.
    try:
        array = np.asarray(value)
    except ValueError:  # rows of several lengths
        array = np.empty(0, object)
    kind = array.dtype.kind
    if kind == "f" or array.dtype.name == "bfloat16":
        return array.astype(keras.config.floatx(), copy=False)
    if kind in "biu":
        return array
    texts = kind in "SU"
    if kind == "O" and array.size:
        texts = all(isinstance(item, str | bytes) for item in array.flat)
    if name.startswith("x") and texts:
        return array.astype(object)  # as TensorFlow holds text

    # The error for any other array says what it holds; a DataFrame of pandas has columns of several
    # types.
    columns = getattr(value, "columns", ())
    for column, of_column in zip(columns, getattr(value, "dtypes", ()), strict=True):
        if of_column.kind not in "fiu":
            raise UserError(
                f"{name}: its column {column!r} holds {of_column}, so that rows are Python objects:"
                " make numbers of all columns, of bool by .astype('float32'), of text by"
                " pandas.get_dummies(…, dtype='float32')"
            )
    if kind in "SU":
        raise UserError(
            f"{name} holds text, first {str(array.flat[0] if array.size else '')[:40]!r}, not"
            " numbers: number its classes from 0, as with np.unique(…, return_inverse=True); for"
            ' numbers in text use .astype("float32")'
        )
    content = str(array.dtype)
    if kind == "O":
        content = "Python objects, or rows of several lengths"
    raise UserError(f"{name} holds {content}: it must hold numbers of one shape")


def rows_in(parts: Sequence[Nest]) -> int:
    """Returns the number of rows, which all leaves share.

    Raises UserError if they differ, or if there are no rows.
    """
    rows = set()
    names = []
    for name, part in zip(PARTS, parts, strict=False):
        for leaf in tf.nest.flatten(part):
            rows.add(len(leaf) if leaf.ndim else 0)
            names.append(f"{name} {tuple(leaf.shape)}")
    shapes = shortened(", ".join(names))
    if not rows or 0 in rows:
        raise UserError(f"no rows: {shapes or 'an empty nest'}")
    if len(rows) > 1:
        raise UserError(f"the parts have different numbers of rows: {shapes}")
    return rows.pop()


def specs_of(parts: Parts) -> Parts:
    """Returns the tf.TensorSpec of one example for parts that have rows in axis 0."""
    return tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), parts)


def with_axes(spec: Nest, *sizes: int | None) -> Nest:
    """Returns the tf.TensorSpec of each leaf, with axes of these sizes before its own."""
    return tf.nest.map_structure(
        lambda leaf: tf.TensorSpec((*sizes, *leaf.shape), leaf.dtype), spec
    )


def described(spec: Nest) -> str:
    """Returns the types and shapes of one example as text, such as `float32 (13,)`."""
    if isinstance(spec, dict):
        return "{" + ", ".join(f"{key!r}: {described(part)}" for key, part in spec.items()) + "}"
    if isinstance(spec, list | tuple):
        return "(" + ", ".join(described(part) for part in spec) + ")"
    return f"{spec.dtype.name} {tuple(spec.shape)}"


class _Rows(ABC):
    """Provides examples, each x, (x, y) or (x, y, sample_weight): what both kinds share."""

    spec: Any  # the tf.TensorSpec of one example, in the structure of its parts
    count: int  # the number of examples in one pass over the data
    # (height, width, channels), if x are grey levels of images
    image_shape: tuple[int, int, int] | None = None
    arrays: Parts = ()  # the parts of all examples, if they are in memory
    has_length = True  # False: the length is unknown, and `count` is what the run reads
    targets: Array | None = None  # y of all rows, if it is one array of integers in memory
    # the error of the last reading, of which TensorFlow passes on only the text
    failure: Exception | None = None
    shaped_as_first = False  # whether all batches must have the lengths of the first

    @property
    def labelled(self) -> bool:
        """Returns whether the examples have targets."""
        return len(self.spec) > 1

    def on_epoch_begin(self) -> None:  # noqa: B027
        """Runs before each evaluation, as `fit` does for a PyDataset.

        Most data have nothing to do.
        """

    def on_epoch_end(self) -> None:  # noqa: B027
        """Runs after each evaluation."""

    def fingerprint(self) -> str:
        """Returns a digest of the rows of `sample`, which changes only with their content."""
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


class Examples(_Rows):
    """Provides examples by row number.

    A subclass needs `count`, and `gather`, or `spec` and `read`.
    """

    threads = 2  # threads that read the rows of the next steps
    sampled_rows = 1024  # the most rows that a fingerprint reads
    # whether all rows of an epoch must be read before `order` is called for the next one
    ends_epochs = False

    def gather(self, rows: Any) -> Parts:
        """Returns (x,), (x, y) or (x, y, sample_weight) of these rows, by TensorFlow operations.

        Here they call `read`.
        rows: an integer tensor of any shape with numbers from 0 to below `count`. Each part is a
            nest of tensors, of shape (*rows.shape, *the shape of one example). Where the examples
            are images, x is (*rows.shape, height, width, channels), 0 to 255, usually uint8, and y,
            if any, is rows.shape, int32, from 0 to below the number of classes. A UserError or
            PlatformFault that `read` raises is kept in `failure`.
        """

        def leaves(numbers: RowNumbers) -> list[Array]:
            try:
                return list(tf.nest.flatten(self.read(numbers)))
            except (UserError, PlatformFault) as error:
                self.failure = error
                raise

        specs = tf.nest.flatten(self.spec)
        reading = tf.autograph.experimental.do_not_convert(leaves)
        tensors = tf.numpy_function(reading, [rows], [spec.dtype for spec in specs], stateful=False)
        tensors = tf.nest.flatten(tensors)  # in eager mode a single output is not in a list
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape((*rows.shape, *spec.shape))
        return tf.nest.pack_sequence_as(self.spec, tensors)

    def read(self, rows: RowNumbers) -> Nest:
        """Returns the arrays of these rows, any shape, in the structure of `spec`.

        It runs on the host.
        """
        raise NotImplementedError

    def rows_of_arrays(self, rows: Any) -> Any:
        """Returns the row numbers in `arrays` of these rows; for examples in memory."""
        return rows

    @cached_property
    def spec(self) -> Parts:
        """Returns the tf.TensorSpec of one example; reads one for it."""
        return specs_of(self.first(1))

    def order(self, seed: int, passes: RowNumbers, positions: RowNumbers) -> RowNumbers:
        """Returns the rows at these positions of passes, each of which has every row once.

        The order is a function of seed and pass. passes: (n,), ascending from 0; positions: (n,), 0
        to below `count`.
        """
        return shuffled(positions, self.count, seed, "order", passes)

    def first(self, count: int) -> Parts:
        """Returns the parts of the first rows, at most `count`, as arrays, read again each time."""
        return as_numpy(self.gather(tf.range(min(count, self.count), dtype=tf.int64)))

    def in_order(self, size: int, takers: int = 1, taker: int = 0) -> tf.data.Dataset:
        """Returns every `takers`-th batch of `size` rows, beginning with batch `taker`.

        The last may be smaller.
        """

        def batch(number: Any) -> Any:
            end = tf.minimum((number + 1) * size, self.count)
            return self.gather(tf.range(number * size, end, dtype=tf.int64))

        numbers = tf.data.Dataset.range(math.ceil(self.count / size)).shard(takers, taker)
        return numbers.map(batch, num_parallel_calls=2, deterministic=True).prefetch(2)

    def sample(self) -> Iterable[Array]:
        row_bytes = max(1, sum(array.nbytes for array in self._arrays(np.zeros(1, np.int64))))
        most = max(_FIRST_ROWS, min(self.sampled_rows, SAMPLE_BYTES // row_bytes))
        # The first rows and drawn ones, the same at each call.
        drawn = np.random.default_rng(self.count).integers(0, self.count, most)
        first = np.arange(min(_FIRST_ROWS, self.count))
        return self._arrays(np.unique(np.concatenate([first, drawn])))

    def _arrays(self, rows: RowNumbers) -> list[Array]:
        return [np.asarray(array) for array in tf.nest.flatten(self.gather(rows))]


class Subset(Examples):
    """Provides `count` rows of other examples, in an order drawn by the seed."""

    def __init__(self, examples: Examples, seed: int, first_position: int, count: int) -> None:
        self._examples = examples
        self._seed = seed
        self._first = first_position
        self.count = count
        self.arrays = examples.arrays
        self.threads = examples.threads
        self.image_shape = examples.image_shape
        self.spec = examples.spec
        targets = examples.targets
        self.targets = None if targets is None else targets[self.located(np.arange(count))]

    @property
    def failure(self) -> Exception | None:  # type: ignore[override]
        return self._examples.failure

    def located(self, rows: RowNumbers) -> RowNumbers:
        """Returns the row numbers of these rows in the other examples, in the shape of `rows`."""
        positions = rows.ravel() + self._first
        return shuffled(positions, self._examples.count, self._seed, HELD_BACK).reshape(rows.shape)

    def sample(self) -> Iterable[Array]:
        return self._examples.sample() if self.arrays else super().sample()

    def gather(self, rows: Any) -> Parts:
        with tf.device(HOST):
            return self._examples.gather(self._locate_tensor(rows))

    def rows_of_arrays(self, rows: Any) -> Any:
        with tf.device(HOST):
            return self._examples.rows_of_arrays(self._locate_tensor(rows))

    def _locate_tensor(self, rows: Any) -> Any:
        located = tf.numpy_function(
            self.located, [tf.cast(rows, tf.int64)], tf.int64, stateful=False
        )
        return tf.ensure_shape(located, rows.shape)


def unfilled(shape: Sequence[int], dtype: Any) -> Array:
    """Returns an uninitialized array for `Examples.read`.

    TensorFlow uses an array that is aligned to 64 bytes as it is; it copies any other one, while
    holding the GIL.
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        return np.empty(shape, kind)
    size = math.prod(shape) * kind.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(kind).reshape(shape)


def as_numpy(parts: Parts) -> Parts:
    """Returns tensors as arrays, in the same structure."""
    return tf.nest.map_structure(lambda part: part.numpy(), parts)


class NestedArrays(Examples):
    """Holds examples of any shape, as arrays, or dicts, lists or tuples of them.

    Raises UserError if they have different numbers of rows, or are not numbers.
    """

    def __init__(self, x: Nest, y: Nest = None, sample_weight: Nest = None) -> None:
        if y is None and sample_weight is not None:
            raise UserError("sample_weight without y: what has no targets has no loss to weight")
        self._hold(*parts_of([part for part in (x, y, sample_weight) if part is not None]))
        for name, part in zip(PARTS[1:], self.arrays[1:], strict=False):
            if (row := first_not_finite(part)) is not None:
                raise UserError(
                    f"{name} holds NaN or infinity, first in row {row:,}: remove or fill these rows"
                )

    def _hold(self, *parts: Nest) -> None:
        self.arrays = parts
        self.count = rows_in(parts)
        self.spec = specs_of(parts)
        y = parts[1] if self.labelled else None
        self.targets = y if isinstance(y, np.ndarray) and y.dtype.kind in "iu" else None

    def sample(self) -> Iterable[Array]:
        leaves = tf.nest.flatten(self.arrays)
        return leaves if sum(leaf.nbytes for leaf in leaves) <= WHOLE_BYTES else super().sample()

    def gather(self, rows: Any) -> Parts:
        with tf.device(HOST):
            return tf.nest.map_structure(lambda part: tf.gather(part, rows), self._tensors)

    @cached_property
    def _tensors(self) -> Any:
        """Returns the arrays as tensors on the host, which all graphs share."""
        with tf.init_scope(), tf.device(HOST):
            return tf.nest.map_structure(tf.constant, self.arrays)


class Arrays(NestedArrays):
    """Holds images in the source's type, usually uint8 grey levels, until they are on a device.

    images: (examples, height, width, channels); labels: (examples,) integers from 0, or None.
        Raises UserError for other shapes.
    """

    def __init__(self, images: Array, labels: Array | None = None) -> None:
        if images.ndim != 4 or not len(images):
            raise UserError(
                f"images of shape {images.shape}: must be (examples, height, width, channels), with"
                " at least one example"
            )
        if labels is not None and labels.shape != images.shape[:1]:
            raise UserError(
                f"labels of shape {labels.shape} for images of shape {images.shape}: one integer"
                " per image is required"
            )
        height, width, channels = images.shape[1:]
        self.images = images
        self.labels = labels
        self.image_shape = (height, width, channels)
        self._hold(*(part for part in (images, labels) if part is not None))

    def take(self, rows: Array) -> "Arrays":
        """Returns a copy of these rows."""
        return Arrays(self.images[rows], None if self.labels is None else self.labels[rows])


def first_not_finite(part: Nest) -> int | None:
    """Returns the first row with NaN or infinity in an array of a nest, else None."""
    for leaf in tf.nest.flatten(part):
        if leaf.dtype.kind == "f" and not (finite := np.isfinite(leaf)).all():
            return int(np.flatnonzero(~finite.reshape(len(leaf), -1).all(axis=1))[0])
    return None


class InSequence(_Rows):
    """Provides the examples of a tf.data.Dataset in its own order.

    If it gives batches, they are cut anew.
    unknown_count: the number of examples in an epoch if the data set's length is unknown or
        infinite; batched: whether an element is a batch, if that is known. Raises UserError if the
        count is 0 then, or if the data set does not give tensors of fixed shapes.
    """

    # It returns the same examples as a new object: TensorFlow reshuffles an object it reads again.
    anew: Callable[[], Any]

    def __init__(
        self,
        source: tf.data.Dataset,
        origin: str,
        unknown_count: int,
        *,
        batched: bool | None = None,
    ) -> None:
        self.anew = lambda: self
        self.batched = makes_batches(source) if batched is None else batched
        # Floating-point numbers become floatx, as in `fit`.
        floatx = keras.config.floatx()
        self._source = source.map(
            lambda *element: tf.nest.map_structure(
                lambda leaf: tf.cast(leaf, floatx) if leaf.dtype.is_floating else leaf, element
            )
        )
        specs = tf.nest.flatten(self._source.element_spec)
        for spec in specs:
            if not isinstance(spec, tf.TensorSpec):
                raise UserError(
                    f"{origin}: the tf.data.Dataset gives {type(spec).__name__}: it must give"
                    " tensors: map them by ragged.to_tensor(shape=…) or tf.sparse.to_dense"
                )

        # timeseries_dataset_from_array leaves lengths undefined, although all batches have those of
        # the first.
        self.shaped_as_first = self.batched and not all(
            spec.shape[1:].is_fully_defined() for spec in specs
        )
        if self.shaped_as_first:
            for first in self._source.take(1):
                self._source = self._source.map(
                    lambda *parts, first=first: tf.nest.map_structure(
                        lambda leaf, like: tf.ensure_shape(leaf, (None, *like.shape[1:])),
                        parts,
                        first,
                    )
                )
        axes = int(self.batched)  # before the shape of one example
        for spec in tf.nest.flatten(self._source.element_spec):
            if not spec.shape[axes:].is_fully_defined():
                raise UserError(
                    f"{origin}: the tf.data.Dataset gives {spec.dtype.name} {tuple(spec.shape)}:"
                    " all lengths but the number of rows must be fixed: pad them, by padded_batch"
                    " or to_tensor(shape=…)"
                )
        self.spec = tf.nest.map_structure(
            lambda spec: tf.TensorSpec(spec.shape[axes:], spec.dtype), self._source.element_spec
        )

        # The length must be known, by the data set or by the settings.
        self._length = int(source.cardinality())
        self._unknown_count = unknown_count
        self.has_length = self._length >= 0
        if self._length == 0:
            raise UserError(f"{origin}: the tf.data.Dataset is empty")
        if not (self.has_length or unknown_count):
            raise UserError(
                f"{origin}: the length of the tf.data.Dataset is unknown or infinite: give the"
                " length of the run with --steps, or the data set's with"
                " tf.data.experimental.assert_cardinality"
            )

    @cached_property
    def count(self) -> int:  # type: ignore[override]
        """Returns the number of examples in one pass.

        Reads all batches once if it must count them.
        """
        if not self.has_length:
            return self._unknown_count
        if not self.batched:
            return self._length
        rows = self._source.map(
            lambda *parts: tf.shape(tf.nest.flatten(parts)[0], out_type=tf.int64)[0]
        )
        return int(rows.reduce(tf.constant(0, tf.int64), lambda total, more: total + more))

    def batches(self, size: int, *, drop_remainder: bool) -> tf.data.Dataset:
        """Returns one pass in parts with `size` rows each, the last one perhaps with fewer."""
        if self.batched:
            return self._source.rebatch(size, drop_remainder=drop_remainder)
        return self._source.batch(size, drop_remainder=drop_remainder)

    def in_order(self, size: int, takers: int = 1, taker: int = 0) -> tf.data.Dataset:
        """Returns what `Examples.in_order` does."""
        return self.batches(size, drop_remainder=False).shard(takers, taker).prefetch(2)

    def first(self, count: int) -> Parts:
        """Returns the parts of the first rows, at most `count`, as arrays."""
        return tf.nest.map_structure(lambda part: part[:count], self._head)

    def sample(self) -> list[Array]:
        return list(tf.nest.flatten(self._head))

    @cached_property
    def _head(self) -> Parts:
        """Returns the parts of the first rows, as many as a fingerprint takes, as arrays.

        They are read once.
        """
        leaves = tf.nest.flatten(self.spec)
        row_bytes = sum(leaf.dtype.size * math.prod(leaf.shape) for leaf in leaves)
        most = min(_SAMPLED_ROWS, SAMPLE_BYTES // max(1, row_bytes))
        return self.read_head(max(HEAD_ROWS, most))

    def read_head(self, rows: int) -> Parts:
        """Reads the parts of the first rows once more."""
        return as_numpy(next(iter(self.batches(rows, drop_remainder=False))))


AnyExamples = Examples | InSequence
