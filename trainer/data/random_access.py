"""Reads a user's examples by number: from an object with `__getitem__`, or from a keras.utils.PyDataset."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.data.dataset import gathered
from trainer.data.nests import Nest, as_arrays, described, rows_in, specs_of
from trainer.data.order import shuffled
from trainer.errors import UserError, reason
from trainer.user_mistakes import message_of, where_raised

Rows = npt.NDArray[Any]


def parts_of(value: Any) -> tuple[Nest, ...]:
    """Returns what one example or batch holds, as (x,), (x, y) or (x, y, sample_weight), in arrays."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(given) <= 3:
        raise UserError(f"it has {len(given)} parts: it must be x, (x, y) or (x, y, sample_weight)")
    return tuple(as_arrays(part, name) for part, name in zip(given, ("x", "y", "sample_weight"), strict=False))


def _cause(error: Exception) -> str:
    """Returns the user's line that raised, if it is known, with the exception."""
    place = where_raised(error)
    return f"{place[0]}: {message_of(error)}" if place else reason(error)


class RandomAccess:
    """Reads one example at a time from any object with `__len__` and `__getitem__(int)`, as PyTorch's data sets have.

    An example is x, (x, y) or (x, y, sample_weight). Several threads read at once, each the rows of one step.
    """

    sampled_rows = 64  # for a fingerprint: reading an example may take long

    def __init__(self, source: Any, origin: str) -> None:
        self._source, self._origin = source, origin
        self.count = len(source)
        if not self.count:
            raise UserError(f"{origin}: it has no examples: its length is 0")
        value = self._item(0)
        first = self._parts(0, value)
        self._spec, self._kinds = _spec(first), _kinds(first)
        # An example of arrays alone, as most are, needs no more than a comparison with the first one.
        plain = isinstance(value, tuple) and not any(tf.nest.is_nested(part) for part in first)
        self._given = _kinds(tuple(np.asarray(part) for part in value)) if plain else None

    def gather(self, rows: Any) -> tuple[Nest, ...]:
        return gathered(self._read, rows, self._spec)

    def _read(self, rows: Rows) -> Nest:
        examples = [self._leaves(row) for row in rows.ravel().tolist()]
        stacked = [
            np.array(leaves, spec.dtype.as_numpy_dtype).reshape(*rows.shape, *spec.shape)
            for leaves, spec in zip(zip(*examples, strict=True), tf.nest.flatten(self._spec), strict=True)
        ]
        return tf.nest.pack_sequence_as(self._spec, stacked)

    def _leaves(self, row: int) -> Sequence[Rows]:
        value = self._item(row)
        if self._given and type(value) is tuple:
            with suppress(ValueError):  # rows of several lengths: the parts say so
                leaves = [np.asarray(part) for part in value]
                if [(leaf.shape, leaf.dtype) for leaf in leaves] == self._given:
                    return leaves
        example = self._parts(row, value)
        if _kinds(example) != self._kinds:
            raise UserError(
                f"{self._origin}: example {row:,} is {described(_spec(example))}, but example 0 is "
                f"{described(self._spec)}: all must have the same parts, shapes and types"
            )
        return list(tf.nest.flatten(example))

    def _item(self, row: int) -> Any:
        try:
            return self._source[row]
        except Exception as error:
            raise UserError(f"{self._origin}: example {row:,} cannot be read: {_cause(error)}") from error

    def _parts(self, row: int, value: Any) -> tuple[Nest, ...]:
        try:
            return parts_of(value)
        except UserError as error:
            raise UserError(f"{self._origin}: example {row:,}: {error}") from None


def _kinds(example: Nest) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Returns what _spec holds in a form that is quick to make and to compare."""
    return [(leaf.shape, leaf.dtype) for leaf in tf.nest.flatten(example)]


def _spec(example: Nest) -> Nest:
    return tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), example)


class NumberedBatches:
    """Reads the batches of a keras.utils.PyDataset by number, in an order drawn from (seed, epoch).

    A row number is that of a batch times the batch size, plus a position in the batch. `on_epoch_end` is called once
    an epoch, when all batches of the epoch have been read; a resumed run first calls it for each epoch before.
    """

    sampled_rows = 4  # for a fingerprint: each may read a batch

    def __init__(self, source: keras.utils.PyDataset, origin: str, *, whole_batches: bool) -> None:
        self._source, self._origin, self._epochs_ended = source, origin, 0
        self.threads = max(1, source.workers)
        batches = len(source)
        if batches < 1:
            raise UserError(f"{origin}: it has no batches: its length is {batches}")
        first = self._batch(0)
        self.batch_size, self._spec = rows_in(first), specs_of(first)
        last = rows_in(self._batch(batches - 1))
        self.left_out = last if whole_batches and last != self.batch_size else 0
        self.count = self.batch_size * (batches - 1) + last - self.left_out
        if not self.count:
            raise UserError(f"{origin}: it has only one batch of {last} rows")

    def gather(self, rows: Any) -> tuple[Nest, ...]:
        return gathered(self._read, rows, self._spec)

    def rows_at(self, seed: int, number: int, positions: Rows) -> Rows:
        while self._epochs_ended < number:
            self._source.on_epoch_end()
            self._epochs_ended += 1
        batches, of_batch = np.divmod(positions, self.batch_size)
        return shuffled(batches, self.count // self.batch_size, seed, "batches", number) * self.batch_size + of_batch

    def _read(self, rows: Rows) -> Nest:
        which, position = np.divmod(rows.ravel(), self.batch_size)
        found = tf.nest.map_structure(
            lambda one: np.empty((rows.size, *one.shape), one.dtype.as_numpy_dtype), self._spec
        )
        for batch in np.unique(which).tolist():
            places = which == batch
            for leaf, held in zip(tf.nest.flatten(found), tf.nest.flatten(self._checked(batch)), strict=True):
                leaf[places] = held[position[places]]
        return tf.nest.map_structure(lambda leaf: leaf.reshape(*rows.shape, *leaf.shape[1:]), found)

    def _checked(self, batch: int) -> tuple[Nest, ...]:
        parts = self._batch(batch)
        count, expected = rows_in(parts), min(self.batch_size, self.count - batch * self.batch_size)
        if specs_of(parts) != self._spec or count != expected:
            raise UserError(
                f"{self._origin}: batch {batch:,} is {count} rows of {described(specs_of(parts))}, but batch 0 is "
                f"{self.batch_size} rows of {described(self._spec)}: all but the last must be alike"
            )
        return parts

    def _batch(self, number: int) -> tuple[Nest, ...]:
        try:
            return parts_of(self._source[number])
        except UserError as error:
            raise UserError(f"{self._origin}: batch {number:,}: {error}") from None
        except Exception as error:
            raise UserError(f"{self._origin}: batch {number:,} cannot be read: {_cause(error)}") from error
