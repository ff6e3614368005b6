"""Reads a user's tf.data.Dataset in its own order, from its start: it has no access by row number."""

import math
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.data.examples import SAMPLE_BYTES, AnyExamples, Array, as_numpy
from trainer.data.nests import PARTS, Nest
from trainer.invariance.compat import makes_batches

HEAD_ROWS = 16  # that are looked at before training
_SAMPLED_ROWS = 1024  # of a fingerprint, at most


class InSequence(AnyExamples):
    """Provides the examples of a tf.data.Dataset, of examples or of batches, which are cut anew, in one fixed order.

    `unknown_count`: the number of examples to take for an epoch where the data set's length is unknown or infinite;
    0: raises UserError.
    """

    spec: tuple[Nest, ...] = ()
    anew: Callable[[], Any]  # the same examples from a new object: TensorFlow shuffles each reading of one anew

    def __init__(self, source: tf.data.Dataset, origin: str, unknown_count: int) -> None:
        self._origin, self.anew = origin, lambda: self
        self.batched = makes_batches(source)
        self._source = source.map(_parts)
        self.spec = tf.nest.map_structure(self._example, self._source.element_spec)
        if any(leaf.dtype == tf.string for leaf in tf.nest.flatten(self.spec[1:])):
            raise UserError(f"{origin}: the targets or weights of the tf.data.Dataset are text: turn them into numbers")
        self._length, self._unknown_count = int(source.cardinality()), unknown_count
        self.has_length = self._length >= 0
        if self._length == 0:
            raise UserError(f"{origin}: the tf.data.Dataset is empty")
        if not (self.has_length or unknown_count):
            raise UserError(
                f"{origin}: the length of the tf.data.Dataset is unknown or infinite: give the length of the run with "
                "--steps, or the data set's with tf.data.experimental.assert_cardinality"
            )

    @cached_property
    def count(self) -> int:  # type: ignore[override]
        """Returns the number of examples in one pass; reads all batches once if it must count them."""
        if not self.has_length:
            return self._unknown_count
        if not self.batched:
            return self._length
        began = time.monotonic()
        count = int(self._source.map(_rows).reduce(tf.constant(0, tf.int64), lambda total, rows: total + rows))
        log.info(f"{self._origin}: {count:,} examples, counted in {time.monotonic() - began:.1f} s")
        return count

    def batches(self, size: int, *, drop_remainder: bool) -> tf.data.Dataset:
        """Returns one pass over the examples: parts with `size` rows each, the last one perhaps with fewer."""
        cut = self._source.rebatch if self.batched else self._source.batch
        return cut(size, drop_remainder=drop_remainder)

    def in_order(self, size: int, takers: int = 1, taker: int = 0) -> tf.data.Dataset:
        return self.batches(size, drop_remainder=False).shard(takers, taker).prefetch(2)

    def first(self, count: int) -> tuple[Nest, ...]:
        parts: tuple[Nest, ...] = tf.nest.map_structure(lambda part: part[:count], self._head)
        return parts

    def sample(self) -> list[Array]:
        return list(tf.nest.flatten(self._head))

    @cached_property
    def _head(self) -> tuple[Nest, ...]:
        """Returns the parts of the first rows, as many as a fingerprint takes, as arrays; they are read once."""
        row_bytes = sum(leaf.dtype.size * math.prod(leaf.shape) for leaf in tf.nest.flatten(self.spec))
        return self.read_head(max(HEAD_ROWS, min(_SAMPLED_ROWS, SAMPLE_BYTES // max(1, row_bytes))))

    def read_head(self, rows: int = HEAD_ROWS) -> tuple[Nest, ...]:
        """Reads the parts of the first rows once more."""
        return as_numpy(next(iter(self.batches(rows, drop_remainder=False))))

    def _example(self, spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec):
            raise UserError(
                f"{self._origin}: the tf.data.Dataset gives {type(spec).__name__}: it must give tensors: map them by "
                "ragged.to_tensor(shape=…) or tf.sparse.to_dense"
            )
        shape = spec.shape[1:] if self.batched else spec.shape
        if not shape.is_fully_defined():
            raise UserError(
                f"{self._origin}: the tf.data.Dataset gives {spec.dtype.name} {tuple(spec.shape)}: all lengths but the "
                "number of rows must be fixed: pad them, by padded_batch or to_tensor(shape=…)"
            )
        return tf.TensorSpec(shape, spec.dtype)


def _rows(*parts: Nest) -> Any:
    return tf.shape(tf.nest.flatten(parts)[0], out_type=tf.int64)[0]


def _parts(*element: Any) -> tuple[Nest, ...]:
    """Returns the parts of an element, with floating-point numbers as floatx, as `fit` passes them."""
    if not 1 <= len(element) <= len(PARTS):
        raise UserError(
            f"the tf.data.Dataset gives {len(element)} parts: it must give x, (x, y) or (x, y, sample_weight)"
        )
    floatx = keras.config.floatx()
    parts: tuple[Nest, ...] = tf.nest.map_structure(
        lambda leaf: tf.cast(leaf, floatx) if leaf.dtype.is_floating else leaf, element
    )
    return parts
