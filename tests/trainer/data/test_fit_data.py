"""Tests the batches of the data sets that `fit` gets, whose smaller batch may lie anywhere."""

from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf

from tests.support import refused
from trainer.data.fit_data import FitBatches, FitData, data_of_fit

ROWS = tf.data.Dataset.range(10)


def sizes(data: FitData, count: int) -> list[int]:
    """Returns the numbers of rows of the first batches that a run reads."""
    train = data.dataset.train
    assert isinstance(train, FitBatches)
    return [len(rows) for (rows,) in train.uncut.repeat().take(count).as_numpy_iterator()]


@pytest.mark.parametrize(
    ("source", "steps", "expected"),
    [
        (ROWS.batch(4), 0, 3),
        (ROWS.batch(4).cache().shuffle(3), 0, 3),
        (ROWS.batch(4).shuffle(3, seed=1).prefetch(1), 2, 2),
        (ROWS.batch(4).repeat(), 7, 7),
        (ROWS.batch(4).repeat(2), 0, 6),
        (ROWS.batch(4).repeat(2), 4, 4),
    ],
)
def test_a_smaller_batch_ends_each_pass(source: tf.data.Dataset, steps: int, expected: int) -> None:
    data = data_of_fit(source, steps=steps)
    assert data.steps == expected
    assert data.batch_size == 4
    if steps == 2:  # a run that ends before it
        assert (data.rows, data.last, sizes(data, 2)) == (8, 0, [4, 4])
    else:
        assert (data.rows, data.last, sizes(data, 8)) == (10, 2, [4, 4, 2, 4, 4, 2, 4, 4])


def test_shuffled_batches_hold_all_rows_in_each_pass() -> None:
    train = data_of_fit(ROWS.batch(4).shuffle(3)).dataset.train
    assert isinstance(train, FitBatches)
    for _ in range(3):
        rows = np.concatenate([rows for (rows,) in train.uncut.as_numpy_iterator()])
        assert sorted(rows) == [*range(10)]


def generated(lengths: Sequence[int]) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(
        lambda: (np.zeros(length) for length in lengths),
        output_signature=tf.TensorSpec((None,), tf.float64),
    )


@pytest.mark.parametrize("lengths", [(2, 4, 3), (4, 2, 4, 4, 2), (4, 2, 2), (4, 2, 4, 3)])
def test_batches_of_several_sizes_are_refused(lengths: tuple[int, ...]) -> None:
    with refused("must have the same size: use unbatch().batch(SIZE)"):
        data_of_fit(generated(lengths))
