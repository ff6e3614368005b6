"""Reads a user's examples by number: from an object with `__getitem__`, or from a keras.utils.PyDataset."""

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.data.examples import Array, Examples, unfilled
from trainer.data.nests import Nest, described, parts_of, rows_in, specs_of
from trainer.data.order import RowNumbers, shuffled
from trainer.user_code.mistakes import message_of, where_raised


class _Items(Examples):
    """Reads items of a user's object: x, (x, y) or (x, y, sample_weight). `kind` names an item in errors."""

    kind = ""

    def __init__(self, source: Any, origin: str) -> None:
        self._source, self._origin = source, origin

    def gather(self, rows: Any) -> tuple[Nest, ...]:
        return self.read_by(self._read, rows)

    def _read(self, rows: RowNumbers) -> Nest:
        specs = tf.nest.flatten(self.spec)
        leaves = [unfilled((rows.size, *spec.shape), spec.dtype.as_numpy_dtype) for spec in specs]
        self._fill(leaves, rows.ravel())
        shaped = [leaf.reshape(*rows.shape, *spec.shape) for leaf, spec in zip(leaves, specs, strict=True)]
        return tf.nest.pack_sequence_as(self.spec, shaped)

    def _fill(self, leaves: list[Array], rows: RowNumbers) -> None:
        """Copies the rows, (n,), to the arrays, (n, …) of each leaf: a seventh of the time of np.array(list)."""
        raise NotImplementedError

    def _example(self, number: int) -> tuple[Nest, ...]:
        """Returns the parts of an item as arrays."""
        try:
            item = self._source[number]
        except Exception as error:
            place = where_raised(error)
            cause = f"{place[0]}: {message_of(error)}" if place else reason(error)
            raise UserError(f"{self._origin}: {self.kind} {number:,} cannot be read: {cause}") from error
        try:
            return parts_of(item if isinstance(item, (tuple, list)) else (item,))
        except UserError as error:
            raise UserError(f"{self._origin}: {self.kind} {number:,}: {error}") from None


class RandomAccess(_Items):
    """Reads an example at a time from any object with `__len__` and `__getitem__(int)`, as PyTorch's data sets have.

    Several threads read at once, each the rows of one step.
    """

    kind = "example"
    sampled_rows = 256  # reading an example may take milliseconds
    threads = max(2, os.cpu_count() or 2)

    def __init__(self, source: Any, origin: str) -> None:
        super().__init__(source, origin)
        self.count = len(source)
        if not self.count:
            raise UserError(f"{origin}: it has no examples: its length is 0")
        first = self._example(0)
        self.spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), first)
        self._leaf_kinds = _kinds(tf.nest.flatten(first))

    def _fill(self, leaves: list[Array], rows: RowNumbers) -> None:
        for place, row in enumerate(rows.tolist()):
            for leaf, value in zip(leaves, self._leaves(row), strict=True):
                leaf[place, ...] = value  # of text, the value in an array without dimensions

    def _leaves(self, row: int) -> list[Array]:
        example = self._example(row)
        leaves: list[Array] = tf.nest.flatten(example)
        if _kinds(leaves) != self._leaf_kinds:
            spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), example)
            raise UserError(
                f"{self._origin}: example {row:,} is {described(spec)}, but example 0 is {described(self.spec)}: all "
                "must have the same parts, shapes and types"
            )
        return leaves


def _kinds(leaves: list[Array]) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Returns shape and type of each leaf, as a spec has them, in a form that is quick to compare."""
    return [(leaf.shape, leaf.dtype) for leaf in leaves]


class NumberedBatches(_Items):
    """Reads the batches of a keras.utils.PyDataset by number, in an order drawn from (seed, epoch).

    A row number is that of a batch times the batch size, plus a position in the batch. `on_epoch_end` is called once
    an epoch, when all batches of the epoch have been read; a resumed run first calls it for each epoch before.
    """

    kind = "batch"
    sampled_rows = 4  # each may read a batch
    ends_epochs = True

    def __init__(self, source: keras.utils.PyDataset, origin: str, *, whole_batches: bool) -> None:
        super().__init__(source, origin)
        self.threads, self._epochs_ended = max(1, source.workers), 0
        batches = len(source)
        if batches < 1:
            raise UserError(f"{origin}: it has no batches: its length is {batches}")
        first, last = (self._example(number) for number in (0, batches - 1))
        self.batch_size, self.spec = rows_in(first), specs_of(first)
        self.left_out = rows_in(last) if whole_batches and rows_in(last) != self.batch_size else 0
        self.count = self.batch_size * (batches - 1) + rows_in(last) - self.left_out
        if not self.count:
            raise UserError(f"{origin}: it has only one batch of {self.left_out} rows")

    def order(self, seed: int, passes: RowNumbers, positions: RowNumbers) -> RowNumbers:
        while self._epochs_ended < passes[-1]:
            self._source.on_epoch_end()
            self._epochs_ended += 1
        batches, places = np.divmod(positions, self.batch_size)
        return shuffled(batches, self.count // self.batch_size, seed, "batches", passes) * self.batch_size + places

    def _fill(self, leaves: list[Array], rows: RowNumbers) -> None:
        batches, positions = np.divmod(rows, self.batch_size)
        for batch in np.unique(batches).tolist():
            places = batches == batch
            for leaf, rows_of_batch in zip(leaves, tf.nest.flatten(self._batch(batch)), strict=True):
                leaf[places] = rows_of_batch[positions[places]]

    def _batch(self, batch: int) -> tuple[Nest, ...]:
        parts = self._example(batch)
        count, expected = rows_in(parts), min(self.batch_size, self.count - batch * self.batch_size)
        if specs_of(parts) != self.spec or count != expected:
            raise UserError(
                f"{self._origin}: batch {batch:,} is {count} rows of {described(specs_of(parts))}, but batch 0 is "
                f"{self.batch_size} rows of {described(self.spec)}: all but the last must be alike"
            )
        return parts
