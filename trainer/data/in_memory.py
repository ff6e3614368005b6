"""Holds examples in memory: arrays and nests of them, of which images are a case."""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.data.examples import AnyExamples, Array, Examples, on_host
from trainer.data.nests import PARTS, Nest, parts_of, rows_in, specs_of

WHOLE_BYTES = 2 * 2**30  # of which a fingerprint reads all: a second
_ROWS_AT_ONCE = 1024


class NestedArrays(Examples):
    """Holds examples of any shape: x, y and sample_weight are arrays, or dicts, lists or tuples of them.

    Raises UserError if they have different numbers of rows, or are not numbers.
    """

    def __init__(self, x: Nest, y: Nest = None, sample_weight: Nest = None) -> None:
        if y is None and sample_weight is not None:
            raise UserError("sample_weight without y: what has no targets has no loss to weight")
        self._hold(*parts_of([part for part in (x, y, sample_weight) if part is not None]))
        for name, part in zip(PARTS[1:], self.arrays[1:], strict=False):
            if (row := _first_not_finite(part)) is not None:
                raise UserError(f"{name} holds NaN or infinity, first in row {row:,}: remove or fill these rows")

    def _hold(self, *parts: Nest) -> None:
        self.arrays, self.count = parts, rows_in(parts)

    @property
    def spec(self) -> tuple[Nest, ...]:
        spec: tuple[Nest, ...] = specs_of(self.arrays)
        return spec

    @property
    def targets(self) -> Array | None:
        y = self.arrays[1] if self.labelled else None
        return y if isinstance(y, np.ndarray) and y.dtype.kind in "iu" else None

    def sample(self) -> Iterator[Array]:
        """Yields the arrays or, if they are larger than WHOLE_BYTES, a row of each block of rows."""
        leaves: list[Array] = tf.nest.flatten(self.arrays)
        block = math.ceil(sum(leaf.nbytes for leaf in leaves) / WHOLE_BYTES)
        if block == 1:
            yield from leaves
            return
        starts = np.arange(0, self.count, block)
        rows = starts + np.random.default_rng(self.count).integers(0, block, len(starts))
        for numbers in np.array_split(np.minimum(rows, self.count - 1), math.ceil(len(rows) / _ROWS_AT_ONCE)):
            yield from (leaf[numbers] for leaf in leaves)

    def gather(self, rows: Any) -> tuple[Nest, ...]:
        with on_host():
            parts: tuple[Nest, ...] = tf.nest.map_structure(lambda part: tf.gather(part, rows), self._tensors)
        return parts

    @cached_property
    def _tensors(self) -> Any:
        """Returns the arrays as tensors on the host, outside of any graph, so that all graphs share them."""
        with tf.init_scope(), on_host():
            return tf.nest.map_structure(tf.constant, self.arrays)


class Arrays(NestedArrays):
    """Holds images, which keep the source's type (usually uint8 grey levels) until they reach the device.

    images: (examples, height, width, channels); labels: (examples,) integers from 0, or None. Raises UserError for
    other shapes.
    """

    def __init__(self, images: Array, labels: Array | None = None) -> None:
        if images.ndim != 4 or not len(images):
            raise UserError(
                f"images of shape {images.shape}: must be (examples, height, width, channels), with at least one "
                "example"
            )
        if labels is not None and labels.shape != (len(images),):
            raise UserError(
                f"labels of shape {labels.shape} for {len(images)} images: one integer per image is required"
            )
        height, width, channels = images.shape[1:]
        self.images, self.labels, self.image_shape = images, labels, (height, width, channels)
        self._hold(*(part for part in (images, labels) if part is not None))

    def take(self, rows: Array) -> "Arrays":
        """Returns a copy of these rows."""
        return Arrays(self.images[rows], None if self.labels is None else self.labels[rows])


def first_unfit_input(examples: AnyExamples) -> int | None:
    """Returns the first row of x in memory with NaN or infinity, else None. A model may mask them: no refusal."""
    return _first_not_finite(examples.arrays[0]) if examples.arrays else None


def _first_not_finite(part: Nest) -> int | None:
    """Returns the first row with NaN or infinity in an array of a nest, else None."""
    for leaf in tf.nest.flatten(part):
        if leaf.dtype.kind == "f" and not (finite := np.isfinite(leaf)).all():
            return int(np.flatnonzero(~finite.reshape(len(leaf), -1).all(axis=1))[0])
    return None
