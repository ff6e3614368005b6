"""Makes a dataset of what a user's data function returns: arrays, rows, batches or a
tf.data.Dataset.

Rows and batches are read by number, from an object with `__getitem__` or a keras.utils.PyDataset.
Whatever cannot be trained on, or would give other rows at a second reading, is one UserError or a
warning before training.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.settings.model_settings import MODELS
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.examples import (
    HEAD_ROWS,
    AnyExamples,
    Array,
    Examples,
    InSequence,
    Nest,
    NestedArrays,
    Parts,
    described,
    is_array,
    parts_of,
    rows_in,
    specs_of,
    unfilled,
    with_axes,
)
from trainer.data.image_arrays import arrays_dataset, held_back
from trainer.data.order import RowNumbers, shuffled
from trainer.user_code.mistakes import message_of, where_raised

_KINDS = (
    "arrays as x, (x, y) or (x, y, sample_weight); an object with __len__ and __getitem__(int) that"
    " gives one example; a keras.utils.PyDataset; a tf.data.Dataset; a pair of those for training"
    " and evaluation; or a Dataset of trainer.data.dataset"
)


def item_of(source: Any, number: int, name: str) -> Parts:
    """Returns the parts of an item of a user's object as arrays.

    Raises UserError, naming the item, if it fails.
    """
    try:
        item = source[number]
    except Exception as error:
        place = where_raised(error)
        cause = f"{place[0]}: {message_of(error)}" if place else reason(error)
        raise UserError(f"{name} cannot be read: {cause}") from error
    try:
        return parts_of(item if isinstance(item, tuple | list) else (item,))
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


class _Items(Examples):
    """Reads items of a user's object: x, (x, y) or (x, y, sample_weight).

    `kind` names an item in errors.
    """

    kind = ""

    def __init__(self, source: Any, origin: str) -> None:
        self._source = source
        self._origin = origin

    def read(self, rows: RowNumbers) -> Nest:
        specs = tf.nest.flatten(self.spec)
        leaves = [unfilled((rows.size, *spec.shape), spec.dtype.as_numpy_dtype) for spec in specs]
        self._fill(leaves, rows.ravel())
        pairs = zip(leaves, specs, strict=True)
        shaped = [leaf.reshape(*rows.shape, *spec.shape) for leaf, spec in pairs]
        return tf.nest.pack_sequence_as(self.spec, shaped)

    def _fill(self, leaves: list[Array], rows: RowNumbers) -> None:
        """Copies the rows, (n,), into `leaves`, (n, …) each.

        `np.array(list)` would take seven times as long.
        """
        raise NotImplementedError

    def _example(self, number: int) -> Parts:
        """Returns the parts of an item as arrays."""
        return item_of(self._source, number, f"{self._origin}: {self.kind} {number:,}")


class RandomAccess(_Items):
    """Reads an example at a time from any object with `__len__` and `__getitem__(int)`.

    PyTorch's data sets have both. Several threads read at once, each the rows of one step.
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
        self.spec = with_axes(first)
        # Shapes and types are compared for each example, and these are quick to compare.
        self._leaf_kinds = [(leaf.shape, leaf.dtype) for leaf in tf.nest.flatten(first)]

    def _fill(self, leaves: list[Array], rows: RowNumbers) -> None:
        for place, row in enumerate(rows.tolist()):
            example = self._example(row)
            values = tf.nest.flatten(example)
            if [(leaf.shape, leaf.dtype) for leaf in values] != self._leaf_kinds:
                raise UserError(
                    f"{self._origin}: example {row:,} is {described(example)}, but example 0 is"
                    f" {described(self.spec)}: all must have the same parts, shapes and types"
                )
            for leaf, value in zip(leaves, values, strict=True):
                leaf[place, ...] = value  # of text, the value in an array without dimensions


class NumberedBatches(_Items):
    """Reads the batches of a keras.utils.PyDataset by number, in an order drawn from (seed, epoch).

    A row number is that of a batch times the batch size, plus a position in the batch.
    `on_epoch_begin` is called once an epoch, before its first batch is read, and `on_epoch_end`
    when all have been read; a resumed run first calls both for each epoch before. whole_batches:
    leaves out a smaller last batch.
    """

    kind = "batch"
    sampled_rows = 4  # each may read a batch
    ends_epochs = True

    def __init__(self, source: keras.utils.PyDataset, origin: str, *, whole_batches: bool) -> None:
        super().__init__(source, origin)
        self.threads = max(1, source.workers)
        self._epochs_begun = 0
        batches = len(source)
        first, last = (self._example(number) for number in (0, batches - 1))
        self.batch_size = rows_in(first)
        self.spec = specs_of(first)
        self.left_out = rows_in(last) if whole_batches and rows_in(last) != self.batch_size else 0
        self.count = self.batch_size * (batches - 1) + rows_in(last) - self.left_out
        if not self.count:
            raise UserError(f"{origin}: it has only one batch of {self.left_out} rows")

    def order(self, seed: int, passes: RowNumbers, positions: RowNumbers) -> RowNumbers:
        while self._epochs_begun <= passes[-1]:
            if self._epochs_begun:
                self.on_epoch_end()
            self.on_epoch_begin()
            self._epochs_begun += 1
        batches, places = np.divmod(positions, self.batch_size)
        whole = self.count // self.batch_size
        return shuffled(batches, whole, seed, "batches", passes) * self.batch_size + places

    def on_epoch_begin(self) -> None:
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._source.on_epoch_end()

    def _fill(self, leaves: list[Array], rows: RowNumbers) -> None:
        batches, positions = np.divmod(rows, self.batch_size)
        for batch in np.unique(batches).tolist():
            places = batches == batch
            parts = self._example(batch)
            count = rows_in(parts)
            expected = min(self.batch_size, self.count - batch * self.batch_size)
            if specs_of(parts) != self.spec or count != expected:
                raise UserError(
                    f"{self._origin}: batch {batch:,} is {count} rows of"
                    f" {described(specs_of(parts))}, but batch 0 is {self.batch_size} rows of"
                    f" {described(self.spec)}: all but the last must be alike"
                )
            for leaf, rows_of_batch in zip(leaves, tf.nest.flatten(parts), strict=True):
                leaf[places] = rows_of_batch[positions[places]]


def own_dataset(
    config: TrainConfig, function: Callable[[TrainConfig], Any], *, trains: bool = True
) -> Dataset:
    """Calls the user's data function and makes a dataset of what it returns.

    Raises UserError if that is no data.
    trains: whether it will be trained on, for which batches must have the run's size; otherwise
        every row is kept. Images for a built-in model are resized and converted as those of any
        source; all other data stay as they are. Raises UserError also if two readings of the first
        examples of a tf.data.Dataset differ.
    """
    origin = f"data={config.data}"
    returned = function(config)
    if isinstance(returned, Dataset):
        for examples in filter(None, (returned.train, returned.evaluation)):
            if not isinstance(examples, AnyExamples):
                raise UserError(
                    f"{origin}: its Dataset holds {type(examples).__name__}: derive the"
                    " class from Examples of trainer.data.dataset, or use Arrays or NestedArrays"
                )
        return replace(returned, drawn=_differs(returned.train, returned.train.first))

    # A built-in model takes arrays of images in its own size.
    train, evaluation = _pair(returned)
    if config.model in MODELS and isinstance(train, tuple) and is_array(train[0]):
        parts = [*train, *(None,) * (2 - len(train)), *(evaluation or (None, None))]
        if len(parts) == 4:
            return arrays_dataset(config, *parts)

    # All other data stay as they are. A command that does not train uses the second part, if any.
    trains = trains or evaluation is not None
    training = _examples(config, train, trains=trains)
    holdout = None if evaluation is None else _examples(config, evaluation, trains=False)
    if holdout is None and config.evaluation_fraction:
        if not isinstance(training, Examples) or training.ends_epochs:
            raise UserError(
                f"evaluation_fraction={config.evaluation_fraction}: {config.data} cannot be split:"
                " let the function return a pair for training and evaluation"
            )
        training, holdout = held_back(config, training)
    if holdout is not None and holdout.spec != training.spec:
        raise UserError(
            f"{origin}: an example for evaluation is {described(holdout.spec)}, but one"
            f" for training is {described(training.spec)}: both must have the same parts, shapes"
            " and types"
        )
    dataset = Dataset(config.data, training, holdout)
    if not isinstance(training, InSequence):
        return replace(dataset, drawn=_differs(training, training.first))

    # A tf.data.Dataset is made anew for each reading, which must give the same rows.
    batches = ""
    if training.batched:
        batches = f", rebatched to global_batch_size={config.global_batch_size}"
    with dataset.reading():
        training.anew = lambda: _examples(config, _pair(function(config))[0], trains=trains)
        again: Any = training.anew()
        if _differs(training, again.read_head):
            raise UserError(
                f"{origin}: two readings of its first examples differ: make the"
                " tf.data.Dataset inside the function, give its shuffle a seed and draw nothing at"
                " random in it (augmentation belongs into the model, or --augment), or a resumed"
                " run and other workers would train on other numbers"
            )
        # The count comes last, because counting the rows of batches shuffles them once more.
        log.info(
            f"{origin}: a tf.data.Dataset, of {training.count:,} examples, is read in its"
            f" own order{batches}, by every worker from its start: a run that resumes at step N"
            " first reads and drops N steps"
        )
        # After a `shuffle` that differs each time, `take` and `skip` would evaluate rows that
        # another epoch trains on.
        if isinstance(holdout, InSequence) and _differs(holdout, holdout.read_head):
            raise UserError(
                f"{origin}: two readings of the examples for evaluation give other rows,"
                " as the shuffle before them is made anew each time: use shuffle(…, seed=1,"
                " reshuffle_each_iteration=False) before take and skip"
            )
    return dataset


def _differs(examples: AnyExamples, read_again: Callable[[int], Any]) -> bool:
    """Returns whether two readings of the first rows differ.

    A resumed run would then train on other numbers.
    """
    if examples.arrays:
        return False
    earlier = tf.nest.flatten(examples.first(HEAD_ROWS))
    for first, second in zip(earlier, tf.nest.flatten(read_again(HEAD_ROWS)), strict=True):
        if not np.array_equal(first, second, equal_nan=first.dtype.kind == "f"):
            return True
    return False


def _pair(returned: Any) -> tuple[Any, Any]:
    """Returns the data for training, and the data for evaluation or None."""
    # Keras returns a list for subset="both".
    is_list = isinstance(returned, list)
    of_keras = is_list and all(isinstance(part, tf.data.Dataset) for part in returned)
    if (isinstance(returned, tuple) or of_keras) and len(returned) == 2:
        train, evaluation = returned  # or (x, y), if the two are not whole examples
        whole = [isinstance(part, tuple) or _is_source(part) for part in returned]
        if all(whole) or (_is_source(train) and evaluation is None):
            return train, evaluation
    return returned, None


def _is_source(value: Any) -> bool:
    """Returns whether `value` gives whole examples, targets included, and is not a part of them."""
    if isinstance(value, tuple | dict | tf.RaggedTensor | tf.SparseTensor) or is_array(value):
        return False
    return not isinstance(value, list) or (bool(value) and isinstance(value[0], tuple | dict))


def _examples(config: TrainConfig, value: Any, *, trains: bool) -> AnyExamples:
    """Makes examples of what a function returned for training or evaluation.

    Raises UserError if that is no data.
    """
    origin = f"data={config.data}"
    if isinstance(value, AnyExamples):
        return value
    if isinstance(value, tf.data.Dataset):
        rows = (config.steps or 0) * config.global_batch_size
        return InSequence(value, origin, rows if trains else 0)
    if isinstance(value, keras.utils.PyDataset):
        batches = NumberedBatches(value, origin, whole_batches=trains)
        size = config.global_batch_size
        if trains and batches.batch_size != size:
            raise UserError(
                f"{origin}: the batches of its PyDataset have {batches.batch_size} rows, but"
                f" global_batch_size is {size}: use --global_batch_size={batches.batch_size}, or"
                f" make batches of {size}"
            )
        if batches.left_out:
            log.info(
                f"{origin}: the last batch has only {batches.left_out} rows and is not trained on"
            )
        return batches
    if isinstance(value, Iterator):
        raise UserError(
            f"{origin}: it returned a {type(value).__name__}, which can be read only once: return"
            f" {_KINDS}"
        )
    if not _is_source(value) and not np.isscalar(value):
        try:
            return NestedArrays(*parts_of(value if isinstance(value, tuple) else (value,)))
        except UserError as error:
            raise UserError(f"{origin}: {error}") from None
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return RandomAccess(value, origin)
    raise UserError(f"{origin}: it returned {type(value).__name__}: return {_KINDS}")
