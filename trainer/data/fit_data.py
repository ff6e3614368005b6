"""Makes a dataset of the arguments of `fit`: arrays, a tf.data.Dataset or a keras.utils.PyDataset,
as Keras takes them.

Here an element of a tf.data.Dataset is a batch, whatever made it, and the last batch of a pass may
be smaller.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.data.dataset import Dataset
from trainer.data.examples import (
    InSequence,
    NestedArrays,
    Parts,
    rows_in,
    specs_of,
    with_axes,
)
from trainer.data.order import RowNumbers, shuffled
from trainer.data.user_data import item_of

BATCH_ROWS = 32  # of Keras, for arrays


class FitArrays(NestedArrays):
    """Holds the arrays of a call of `fit`.

    shuffles: whether each pass over them has an order of its own.
    """

    def __init__(self, parts: Parts, *, shuffles: bool) -> None:
        super().__init__(*parts)
        self._shuffles = shuffles

    def order(self, seed: int, passes: RowNumbers, positions: RowNumbers) -> RowNumbers:
        return super().order(seed, passes, positions) if self._shuffles else positions


class FitBatches(InSequence):
    """Provides the batches of a tf.data.Dataset in its own order.

    sizes: the number of rows of each batch, up to the end of the data set or of the run.
    """

    def __init__(self, source: tf.data.Dataset, origin: str, sizes: Sequence[int]) -> None:
        super().__init__(source, origin, unknown_count=1, batched=True)
        self.source = source
        self.name = origin
        self.sizes = sizes
        if not sizes:
            raise UserError(f"{origin}: the tf.data.Dataset is empty")
        self.batch_size = max(sizes)

    @cached_property
    def count(self) -> int:  # type: ignore[override]
        """Returns the number of examples in all batches."""
        return sum(self.sizes)

    def of_pass(self, most: int) -> Sequence[int]:
        """Returns the sizes of the batches of one pass, which a smaller batch may end.

        A data set that repeats itself has several passes.
        most: how many batches a run reads; 0: the data set is read again from its start. Raises
            UserError for batches of several sizes.
        """
        sizes = self.sizes
        ends = [number + 1 for number, size in enumerate(sizes) if size < self.batch_size]
        steps = ends[0] if ends else len(sizes)
        for number, size in enumerate(sizes):
            if size != sizes[number % steps] or (len(sizes) % steps and not most):
                raise UserError(
                    f"{self.name}: batch {number:,} has {size} rows and batch 0 has {sizes[0]}: all"
                    " but a smaller last one must have the same size: use unbatch().batch(SIZE)"
                )
        return sizes[:steps]

    @property
    def uncut(self) -> tf.data.Dataset:
        """Returns the batches as they are, where `batches` would cut them anew."""
        return self._source


def rows_of(*parts: Any) -> Any:
    """Returns the number of rows of a batch, in a graph."""
    return tf.shape(tf.nest.flatten(parts)[0], out_type=tf.int64)[0]


def batches_of_dataset(
    source: tf.data.Dataset, origin: str, most: int = 0, *, trains: bool = False
) -> FitBatches:
    """Returns the batches of a tf.data.Dataset.

    It is read once to count their rows unless its type says them.
    most: how many batches are read at most; 0: all; trains: whether a smaller batch is moved to the
        end of its pass, from where a shuffle of batches has put it. Raises UserError for an
        infinite data set without a limit.
    """
    if source.cardinality() == tf.data.INFINITE_CARDINALITY and not most:
        raise UserError(f"{origin}: the tf.data.Dataset is infinite: give steps_per_epoch")
    counted = source.take(most) if most else source
    leaves = tf.nest.flatten(source.element_spec)
    rows = {leaf.shape[0] if leaf.shape.rank else None for leaf in leaves}
    length = int(counted.cardinality())
    if length > 0 and len(rows) == 1 and rows.isdisjoint({None}):
        return FitBatches(source, origin, [int(size) for size in rows if size] * length)

    # The smaller batch of a data set that ends is put last; of others the passes stay as they are.
    ends = trains and (not most or source.cardinality() >= 0)
    sizes = [*map(int, (source if ends else counted).map(rows_of).as_numpy_iterator())]
    size = max(sizes, default=0)
    if ends and sum(rows < size for rows in sizes) == 1:
        sizes = sorted(sizes, reverse=True)
        source = source.group_by_window(
            lambda *parts: tf.cast(rows_of(*parts) < size, tf.int64),
            lambda smaller, batches: batches,
            window_size_func=lambda smaller: 1 + smaller,
        )
    return FitBatches(source, origin, sizes[: most or None])


def batches_of_sequence(
    source: keras.utils.PyDataset, origin: str, *, shuffles: bool, seed: int
) -> FitBatches:
    """Returns the batches of a PyDataset.

    shuffles: whether each pass draws an order of all but a smaller last one.
    """
    # All batches have the size of the first, but the last one may be smaller.
    count = len(source)
    passes = itertools.count()

    def batch(number: int) -> Parts:
        return item_of(source, number, f"{origin}: batch {number:,}")

    first = batch(0)
    sizes = [rows_in(first)] * (count - 1) + [rows_in(batch(count - 1))]
    whole = count - (sizes[-1] < sizes[0])

    # Each pass is a reading by TensorFlow, and calls the hooks of an epoch as `fit` does.
    def batches_of_pass() -> Iterator[Parts]:
        pass_number = next(passes)
        numbers = np.arange(count)
        source.on_epoch_begin()
        if shuffles:
            numbers[:whole] = shuffled(numbers[:whole], whole, seed, "batches", pass_number)
        for number in numbers.tolist():
            yield batch(number)
        source.on_epoch_end()

    dataset = tf.data.Dataset.from_generator(
        batches_of_pass, output_signature=with_axes(specs_of(first), None)
    )
    return FitBatches(dataset, origin, sizes)


@dataclass(frozen=True)
class FitData:
    """Holds what `fit` trains and validates on, and how many rows its batches have."""

    dataset: Dataset
    batch_size: int
    rows: int  # of a pass
    last: int  # rows of the smaller last batch of a pass; 0: all have one size
    steps: int  # batches up to the end of the data, or of the run
    validation_batch_size: int


def data_of_fit(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffles: bool = True,
    validation_data: Any = None,
    validation_split: float = 0.0,
    validation_batch_size: int | None = None,
    validation_steps: int | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> FitData:
    """Makes a dataset of the arguments of `fit`.

    steps: how many a run has, if `steps_per_epoch` limits them. Raises UserError for what cannot be
    trained on.
    """
    train, size = examples_of_fit(
        "x",
        x,
        y,
        sample_weight,
        batch_size=batch_size,
        shuffles=shuffles,
        steps=steps,
        seed=seed,
        trains=True,
    )

    # Validation has the last rows of the arrays, or data of its own.
    evaluation: FitArrays | FitBatches | None = None
    validation_size = validation_batch_size or size
    if validation_split:
        if not isinstance(train, FitArrays):
            raise UserError(
                f"validation_split={validation_split}: x is no arrays: give validation_data"
            )
        count = math.floor(train.count * (1.0 - validation_split))
        if not 0 < count < train.count:
            raise UserError(
                f"validation_split={validation_split} leaves no rows of {train.count} for one of"
                " the parts"
            )
        parts = train.arrays
        first = tf.nest.map_structure(lambda leaf: leaf[:count], parts)
        rest = tf.nest.map_structure(lambda leaf: leaf[count:], parts)
        train = FitArrays(first, shuffles=shuffles)
        evaluation = FitArrays(rest, shuffles=False)
        size = min(size, train.count)
    elif validation_data is not None:
        if not isinstance(validation_data, tuple | list):
            validation_data = [validation_data]
        evaluation, validation_size = examples_of_fit(
            "validation_data",
            *validation_data,
            batch_size=validation_size,
            shuffles=False,
            steps=validation_steps,
        )
    if evaluation and validation_steps:
        evaluation = first_batches(evaluation, validation_steps, validation_size)
    rows = train.count
    batches = math.ceil(rows / size)
    if isinstance(train, FitBatches):
        rows = sum(train.of_pass(steps or 0))
        batches = len(train.sizes)
    dataset = Dataset("fit", train, evaluation)
    return FitData(dataset, size, rows, rows % size, batches, validation_size)


def first_batches(
    examples: FitArrays | FitBatches, steps: int, batch_size: int
) -> FitArrays | FitBatches:
    """Returns the examples of the first batches alone, `steps` of them."""
    if isinstance(examples, FitBatches):
        return FitBatches(examples.source.take(steps), examples.name, examples.sizes[:steps])
    rows = steps * batch_size
    parts = tf.nest.map_structure(lambda leaf: leaf[:rows], examples.arrays)
    return FitArrays(parts, shuffles=False)


def examples_of_fit(
    name: str,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffles: bool = False,
    steps: int | None = None,
    seed: int = 0,
    trains: bool = False,
) -> tuple[FitArrays | FitBatches, int]:
    """Returns the examples of x, y and sample_weight, and how many rows their batches have.

    trains: as in `batches_of_dataset`. Raises UserError, naming the argument, for what `fit` does
        not take, and for Python generators.
    """
    if isinstance(x, tf.data.Dataset | keras.utils.PyDataset):
        if y is not None or sample_weight is not None:
            raise UserError(
                f"{name}: a {type(x).__name__} gives targets and weights itself: drop y and"
                " sample_weight"
            )
        if isinstance(x, keras.utils.PyDataset):
            batches = batches_of_sequence(x, name, shuffles=shuffles, seed=seed)
        else:
            batches = batches_of_dataset(x, name, steps or 0, trains=trains)
        return batches, batches.batch_size
    if isinstance(x, Iterator):
        raise UserError(
            f"{name}: a {type(x).__name__} can be read only once, and not again after a resume:"
            " give tf.data.Dataset.from_generator(…, output_signature=…), or a"
            " keras.utils.PyDataset"
        )

    try:
        arrays = FitArrays((x, y, sample_weight), shuffles=shuffles)
    except UserError as error:
        place = "fit" if name == "x" else name
        raise UserError(f"{place}: {error}") from None
    return arrays, min(batch_size or BATCH_ROWS, arrays.count)
