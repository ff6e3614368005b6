"""Makes a dataset of whatever a user's data function returns: arrays, rows, batches or a tf.data.Dataset."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.config.train_config import MODELS, TrainConfig
from trainer.data.arrays import arrays_dataset, held_back
from trainer.data.dataset import Arrays, Dataset, Examples, InSequence, NestedArrays, first_rows
from trainer.data.in_sequence import TensorFlowData
from trainer.data.nests import described, is_array, specs_of
from trainer.data.random_access import NumberedBatches, RandomAccess
from trainer.errors import UserError
from trainer.log import log

_KINDS = (
    "arrays as x, (x, y) or (x, y, sample_weight); a pair of those for training and evaluation; an object with "
    "__len__ and __getitem__(int) that gives one example; a keras.utils.PyDataset; a tf.data.Dataset; or a Dataset "
    "of trainer.data.dataset"
)
_COMPARED_ROWS = 16  # as many as the head of data in sequence


def own_dataset(config: TrainConfig, function: Callable[[TrainConfig], Any], *, trains: bool = True) -> Dataset:
    """Returns the dataset of what the function in `config.data` returns. Raises UserError if that is no data.

    `trains`: it will be trained on, so that batches must be those of the run; else every row is kept.

    Images for a built-in model are resized and converted as those of any source; all other data stay as they are.
    Raises UserError, too, if two readings of the first examples differ.
    """
    returned = function(config)
    if isinstance(returned, Dataset):
        _check_repeatable(config, returned.train)
        return returned
    train, evaluation = _pair(returned)
    if config.model in MODELS and isinstance(train, tuple) and is_array(train[0]):
        parts = [*train, *(None,) * (2 - len(train)), *(evaluation or (None, None))]
        if len(parts) == 4:
            return arrays_dataset(config, *parts)
    origin = f"data={config.data}"
    trains = trains or evaluation is not None  # then the first part is not what another command uses
    training = _examples(config, train, origin, trains=trains)
    held = None if evaluation is None else _examples(config, evaluation, origin, trains=False)
    if held is None and config.evaluation_fraction:
        training, held = _split(config, training)
    if isinstance(training, InSequence):
        log.info(
            f"{origin}: a tf.data.Dataset is read in its own order, by every worker from its start: a run that resumes "
            "at step N first reads and drops N steps"
        )
    # A tf.data.Dataset may shuffle anew at each reading of the same object, so it is made twice.
    again = _pair(function(config))[0] if isinstance(training, InSequence) else None
    _check_repeatable(config, training, None if again is None else _examples(config, again, origin, trains=trains))
    dataset = Dataset(config.data, training, held)
    if held is not None:
        _check_alike(dataset, held)
    return dataset


def _check_repeatable(
    config: TrainConfig, examples: Examples | InSequence, again: Examples | InSequence | None = None
) -> None:
    """Reads the first rows twice. Raises UserError if they differ: a resumed run would train on other numbers."""
    if isinstance(examples, (Arrays, NestedArrays)):
        return
    one, other = (tf.nest.flatten(first_rows(part, _COMPARED_ROWS)) for part in (examples, again or examples))
    if not all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(one, other, strict=True)):
        raise UserError(
            f"data={config.data}: two readings of its first examples differ: give its shuffle a seed and draw nothing "
            "at random in it (augmentation belongs into the model, or --augment), or a resumed run and other workers "
            "would train on other numbers"
        )


def _pair(returned: Any) -> tuple[Any, Any]:
    """Returns what is for training and what for evaluation, or None."""
    if not isinstance(returned, tuple):
        return returned, None
    if len(returned) == 2:
        train, evaluation = returned
        if isinstance(train, tuple) and isinstance(evaluation, tuple):
            return train, evaluation
        if _is_source(train) and (evaluation is None or _is_source(evaluation)):
            return train, evaluation
    return returned, None


def _is_source(value: Any) -> bool:
    """Returns whether `value` gives whole examples, targets included, and is not a part of them."""
    if isinstance(value, (tuple, dict)) or is_array(value):
        return False
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], (tuple, dict))
    return True


def _examples(config: TrainConfig, given: Any, origin: str, *, trains: bool) -> Examples | InSequence:
    if isinstance(given, InSequence) or (hasattr(given, "gather") and hasattr(given, "count")):
        own: Examples | InSequence = given
        return own
    if isinstance(given, tf.data.Dataset):
        return _in_sequence(config, given, origin, trains=trains)
    if isinstance(given, keras.utils.PyDataset):
        return _numbered(config, given, origin, trains=trains)
    if isinstance(given, Iterator):
        raise UserError(f"{origin}: it returned a {type(given).__name__}, which can be read only once: return {_KINDS}")
    if not _is_source(given) and not np.isscalar(given):
        parts = given if isinstance(given, tuple) else (given,)
        if not 1 <= len(parts) <= 3:
            raise UserError(f"{origin}: it returned a tuple of {len(parts)}: return {_KINDS}")
        try:
            return NestedArrays(*parts)
        except UserError as error:
            raise UserError(f"{origin}: {error}") from None
    if hasattr(given, "__len__") and hasattr(given, "__getitem__"):
        return RandomAccess(given, origin)
    raise UserError(f"{origin}: it returned {type(given).__name__}: return {_KINDS}")


def _in_sequence(config: TrainConfig, given: tf.data.Dataset, origin: str, *, trains: bool) -> InSequence:
    return TensorFlowData(given, origin, (config.steps or 0) * config.global_batch_size if trains else 0)


def _numbered(config: TrainConfig, given: keras.utils.PyDataset, origin: str, *, trains: bool) -> NumberedBatches:
    batches = NumberedBatches(given, origin, whole_batches=trains)
    if trains and batches.batch_size != config.global_batch_size:
        raise UserError(
            f"{origin}: the batches of its PyDataset have {batches.batch_size} rows, but global_batch_size is "
            f"{config.global_batch_size}: use --global_batch_size={batches.batch_size}, or make them so"
        )
    if trains and batches.left_out:
        log.info(f"{origin}: the last batch has only {batches.left_out} rows and is not trained on")
    return batches


def _split(config: TrainConfig, examples: Examples | InSequence) -> tuple[Examples, Examples]:
    """Holds back `evaluation_fraction` of the rows, drawn by the seed."""
    if isinstance(examples, (InSequence, NumberedBatches)):
        raise UserError(
            f"evaluation_fraction={config.evaluation_fraction}: {config.data} cannot be split: let the function "
            "return a pair for training and evaluation"
        )
    return held_back(config, examples)


def _check_alike(dataset: Dataset, held: Examples | InSequence) -> None:
    spec = held.spec if isinstance(held, InSequence) else specs_of(first_rows(held, 1))
    if spec != dataset.spec:
        raise UserError(
            f"data={dataset.name}: an example for evaluation is {described(spec)}, but one for training is "
            f"{described(dataset.spec)}: both must have the same parts, shapes and types"
        )
