"""Tests that orders of rows are uniform, as far as chi-square tests over many keys can tell, at any
number of rows."""

import math
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tests.fixtures import parametrize
from tests.support import refused
from tests.trainer.data.test_batches import part_of
from trainer.base.settings.step_counts import Schedule
from trainer.base.settings.train_config import TrainConfig
from trainer.data.batches import batches
from trainer.data.examples import Examples
from trainer.data.image_arrays import arrays_dataset, held_back
from trainer.data.order import shuffled

LARGE = 10**9


def orders(rows: int, keys: int, first: int = 0) -> Any:
    """Returns the orders of `keys` passes, (keys, rows)."""
    passes = np.repeat(np.arange(first, first + keys), rows)
    return shuffled(np.tile(np.arange(rows), keys), rows, 11, "test", passes).reshape(keys, rows)


def deviation(counts: Any, fixed: int = 1) -> float:
    """Returns by how many standard deviations the chi-square statistic of equally likely cells
    misses its mean."""
    expected = counts.mean()
    free = counts.size - fixed
    return float(((counts - expected) ** 2 / expected).sum() - free) / math.sqrt(2 * free)


@parametrize("rows", [1, 2, 3, 7, 16, 17, 64, 103, 1000, 65536])
def test_an_order_has_every_row_once_and_any_part_of_it_can_be_computed_alone(rows: int) -> None:
    whole = orders(rows, 3)
    assert (np.sort(whole) == np.arange(rows)).all()
    some = np.arange(rows)[::3]
    assert np.array_equal(shuffled(some, rows, 11, "test", 2), whole[2, some])


@parametrize("rows", [2, 3, 4, 5, 6])
def test_all_orders_of_few_rows_are_equally_frequent(rows: int) -> None:
    codes = np.concatenate(
        [
            orders(rows, 50_000, start) @ rows ** np.arange(rows)
            for start in range(0, 400_000, 50_000)
        ]
    )
    _, counts = np.unique(codes, return_counts=True)
    assert len(counts) == math.factorial(rows)
    assert abs(deviation(counts)) < 4


@parametrize("rows, keys", [(100, 20_000), (10_000, 400)])
def test_rows_positions_neighbours_and_epochs_are_independent(rows: int, keys: int) -> None:
    found = orders(rows, keys)
    bins = min(rows, 100)
    where = found * bins // rows
    places = np.broadcast_to(np.arange(rows) * bins // rows, found.shape)

    def table(one: Any, other: Any) -> Any:
        return np.bincount((one * bins + other).ravel(), minlength=bins * bins).reshape(bins, bins)

    assert abs(deviation(table(places, where), fixed=2 * bins - 1)) < 4
    steps = (found[:, 1:] - found[:, :-1]) % rows  # never 0, else uniform
    assert abs(deviation(np.bincount(steps.ravel(), minlength=rows)[1:])) < 4
    position = np.argsort(found)  # of each row
    moved = (position[1:] - position[:-1]) % rows  # of the same row, from one epoch to the next
    assert abs(deviation(np.bincount(moved.ravel(), minlength=rows))) < 4
    fixed = (position[1:] == position[:-1]).sum(axis=1)  # rows that keep their place: 1 on average
    assert abs(fixed.mean() - 1) < 4 / math.sqrt(keys)


@dataclass(frozen=True)
class Made(Examples):
    """Makes its rows: x is the number of the row."""

    count: int = LARGE

    def gather(self, rows: Any) -> Any:
        assert rows.dtype == tf.int64
        return (rows,)


@parametrize("first_step", [0, 10**7 - 1])
def test_a_billion_rows_need_no_memory(first_step: int) -> None:
    schedule = Schedule(LARGE, 100, 1, seed=0)
    tracemalloc.start()
    kept, held = held_back(TrainConfig(evaluation_fraction=0.25), Made(4 * LARGE))
    assert kept.count == 3 * LARGE == 3 * held.count
    for examples in (Made(), held):
        (steps,) = zip(
            *batches(examples, schedule, part_of(1, 100), first_step).take(3), strict=True
        )
        rows = np.concatenate([step.numpy().ravel() for step in steps])
        assert len(set(rows.tolist())) == 300
        assert rows.max() > 0.9 * examples.count
        again, *_ = batches(examples, schedule, part_of(1, 100), first_step + 2).take(1)
        assert np.array_equal(again[0].numpy(), steps[2].numpy())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


@parametrize("count", [10, 1001])
def test_both_parts_of_a_split_have_each_row_once_for_arrays_and_for_other_examples(
    count: int,
) -> None:
    config = TrainConfig(evaluation_fraction=0.3, image_size=1, channels=1, global_batch_size=1)
    images = np.arange(count).astype(np.uint8).reshape(-1, 1, 1)
    made = held_back(config, Made(count))
    rows = [part.gather(tf.range(part.count, dtype=tf.int64))[0].numpy() for part in made]
    assert sorted(np.concatenate(rows)) == list(range(count))
    dataset = arrays_dataset(config, images, np.arange(count))
    for part, expected in zip((dataset.train, dataset.evaluation), rows, strict=True):
        assert np.array_equal(part.labels, np.sort(expected))
    with refused("leaves one side empty"):
        held_back(TrainConfig(evaluation_fraction=0.01), Made(10))
