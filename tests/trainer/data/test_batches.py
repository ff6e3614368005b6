"""Tests that the order of the data is a function of (seed, step), whichever replica reads the
rows."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_array_equal

from tests.fixtures import Patch, parametrize
from tests.support import refused
from trainer.base.errors import PlatformFault, UserError
from trainer.base.settings.step_counts import Schedule
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import Replicas
from trainer.data.batches import ReplicaRows, batches, copied_ahead, row_numbers
from trainer.data.dataset import Arrays, Dataset, NestedArrays
from trainer.data.examples import Examples, InSequence, Subset, unfilled
from trainer.data.image_arrays import load_digits
from trainer.data.sources import load_dataset
from trainer.data.user_data import RandomAccess
from trainer.invariance.internals import separate_collectives


def numbered(examples: int) -> Arrays:
    """Returns images whose pixel is their row number."""
    return Arrays(np.arange(examples, dtype=np.int32).reshape(-1, 1, 1, 1), np.arange(examples))


def part_of(replicas: int, rows: int) -> Replicas:
    """Returns the replicas of one worker with `rows` each, without a strategy."""
    return Replicas(
        None, tuple(f"CPU:{number}" for number in range(replicas)), rows, replicas * rows
    )


def order(schedule: Schedule, first_step: int, steps: int) -> list[Any]:
    rows = row_numbers(numbered(schedule.examples), schedule, first_step, first_step + steps)
    return [step.numpy() for step in rows]


def test_an_epoch_is_a_permutation_cut_into_steps() -> None:
    schedule = Schedule(examples=103, global_batch_size=10, batches_per_step=2, seed=1)
    assert (schedule.examples_per_step, schedule.steps_per_epoch) == (20, 5)
    first, second = (np.concatenate(order(schedule, start, 5)).ravel() for start in (0, 5))
    assert len(set(first)) == len(set(second)) == 100
    assert not np.array_equal(first, second)


@parametrize(
    "examples",
    [numbered(8), NestedArrays({"a": np.arange(8)}), Subset(numbered(8), 0, 0, 8)],
    ids=lambda examples: type(examples).__name__,
)
def test_rows_are_gathered_in_the_hosts_memory(examples: Any) -> None:
    """A second logical device stands for a GPU, to which TensorFlow would first copy all
    examples."""
    with tf.device("CPU:1"):
        found = tf.nest.flatten(examples.gather(tf.constant([3, 5])))
    assert {part.device[-5:] for part in found} == {"CPU:0"}


@parametrize("first_step", [1, 4, 5, 7, 12])
def test_a_run_can_begin_at_any_step(first_step: int) -> None:
    schedule = Schedule(examples=53, global_batch_size=10, batches_per_step=1, seed=3)
    assert np.array_equal(
        order(schedule, 0, 15)[first_step:], order(schedule, first_step, 15 - first_step)
    )


def test_a_step_that_reads_more_than_there_is_goes_round_again() -> None:
    schedule = Schedule(examples=7, global_batch_size=5, batches_per_step=3, seed=0)
    assert schedule.steps_per_epoch == 1
    for rows in order(schedule, 0, 4):
        assert rows.shape == (3, 5)
        assert set(np.bincount(rows.ravel(), minlength=7)) <= {2, 3}


@parametrize("kind", ["arrays", "held back", "sequence", "rows"])
def test_rows_of_several_steps_come_together(kind: str) -> None:
    """From any multiple of their number on, whatever the data are."""
    examples: Any = {
        "arrays": numbered(40),
        "held back": Subset(numbered(60), 1, 4, 40),
        "rows": RandomAccess([(row, row) for row in range(40)], "data"),
        "sequence": InSequence(
            tf.data.Dataset.from_tensor_slices((np.arange(40), np.arange(40))), "data", 0
        ),
    }[kind]
    schedule = Schedule(examples=40, global_batch_size=8, batches_per_step=2, seed=5)
    alone = part_of(1, 8)
    together = batches(examples, schedule, alone, 6, steps_per_element=3).take(2)
    one_by_one = batches(examples, schedule, alone, 6).take(6).batch(3)
    for several, expected in zip(together, one_by_one, strict=True):
        assert several[0].shape[:4] == (3, 1, 2, 8)
        tf.nest.map_structure(assert_array_equal, several, expected)


@parametrize("replicas", [1, 2])
def test_rows_copied_ahead_are_those_of_the_host_on_each_device(replicas: int) -> None:
    """Logical CPU devices stand for GPUs, the second one also for the only one of a run."""
    devices = ("CPU:0", "CPU:1") if replicas == 2 else ("CPU:1",)
    separate_collectives()
    strategy = (
        tf.distribute.MirroredStrategy(list(devices))
        if replicas == 2
        else tf.distribute.get_strategy()
    )
    part = Replicas(strategy, devices, 8 // replicas, 8)
    steps = batches(
        numbered(40),
        Schedule(examples=40, global_batch_size=8, batches_per_step=2, seed=5),
        part,
        3,
    )
    ahead = copied_ahead(steps, part)
    for expected in steps.take(7):
        found = next(ahead)
        parts = found.parts if isinstance(found, ReplicaRows) else found
        values = zip(*map(strategy.experimental_local_results, parts), strict=True)
        for number, (device, (images, labels)) in enumerate(zip(devices, values, strict=True)):
            assert images.device[-5:] == labels.device[-5:] == device
            assert np.array_equal(images, expected[0][number : number + 1])
            assert np.array_equal(labels, expected[1][number : number + 1])


def test_text_stays_on_the_host() -> None:
    part = Replicas(tf.distribute.get_strategy(), ("CPU:1",), 8, 8)
    steps = batches(numbered(40), Schedule(40, 8, 1, 5), part).map(
        lambda image, label: (image, tf.strings.as_string(label))
    )
    images, texts = next(copied_ahead(steps, part))
    assert images.device[-5:] == texts.device[-5:] == "CPU:0"


@parametrize("kind", ["uint8", "float64", "bool"])
def test_tensorflow_takes_over_what_reading_fills(kind: str) -> None:
    """It copies an array at another address, while it holds Python's lock."""
    array = unfilled((3, 5, 7), kind)
    assert (array.ctypes.data % 64, array.dtype.name, array.shape) == (0, kind, (3, 5, 7))


def test_digits_are_the_known_ones() -> None:
    dataset = load_digits(TrainConfig(image_size=8)).train
    assert dataset.images.shape == (1797, 8, 8, 1)
    counts = np.bincount(dataset.labels)
    assert (len(counts), counts.min(), counts.max()) == (10, 174, 183)
    assert (dataset.images.min(), dataset.images.max()) == (0, 255)
    # The first one is a 0: dark in the middle, light around it.
    assert dataset.images[0, 3:5, 3:5].mean() < 20 < dataset.images[0, 1:7, 2:6].mean()


def test_arrays_that_do_not_fit_are_refused() -> None:
    with refused(
        "images of shape (0, 8, 8, 1): must be (examples, height, width, channels), with at"
        " least one"
    ):
        Arrays(np.zeros((0, 8, 8, 1)))
    with refused("labels of shape (4,) for images of shape (5, 8, 8, 1): one integer per image"):
        Arrays(np.zeros((5, 8, 8, 1)), np.zeros(4))


def of_images(count: int, size: int) -> Dataset:
    return Dataset("own", Arrays(np.zeros((count, size, size, 1), np.uint8)))


@parametrize(
    "returned, line",
    [
        (of_images(3, 32), "3 examples are fewer than global_batch_size=64"),
        (of_images(99, 5), "images are (5, 5, 1), but the settings require (32, 32, 1)"),
        (3, "it returned int"),
        (
            Dataset("own", range(5)),  # type: ignore[arg-type]
            (
                "its Dataset holds range: derive the class from Examples of trainer.data.dataset,"
                " or use"
            ),
        ),
    ],
    ids=["few", "wrong size", "no dataset", "strange class"],
)
def test_a_users_own_source_that_does_not_fit_is_refused(
    returned: Any, line: str, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(globals(), "returned", lambda config: returned)
    with refused(line):
        load_dataset(TrainConfig(data=f"{__name__}:returned"))


def test_a_function_that_cannot_be_imported_is_named() -> None:
    with refused("cannot import no_such_package"):
        load_dataset(TrainConfig(data="no_such_package.data:load"))


@parametrize("kind", [UserError, PlatformFault])
def test_what_reading_raises_stays_what_it_is(kind: type[Exception]) -> None:
    """Raises an error inside TensorFlow, which would turn it into an UnknownError."""
    error = kind("part-3#1: cannot be decoded; gs://bucket/ä")

    class Damaged(Examples):
        count = 9
        spec = (tf.TensorSpec((), tf.int32),)

        def read(self, rows: Any) -> Any:
            raise error

    examples = Damaged()
    for dataset in (Dataset("d", examples), Dataset("d", numbered(9), Subset(examples, 0, 0, 8))):
        with pytest.raises(kind) as caught, dataset.reading():
            next(iter(batches(examples, Schedule(9, 3, 1, 0), part_of(1, 3))))
        assert caught.value is error
        with pytest.raises(tf.errors.InvalidArgumentError), dataset.reading():
            tf.reshape(tf.zeros(3), (2,))
