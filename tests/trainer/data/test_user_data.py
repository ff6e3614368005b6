"""Tests that data of a user's function are the same on any replicas, workers and restarts, or
refused in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_array_equal

from tests.drill import read
from tests.fixtures import SLOW, Log, Patch, parametrize
from tests.support import (
    largest_difference,
    refused,
    resolved,
    run_job,
    run_steps,
    saved_model,
    slow,
)
from trainer.base.settings.step_counts import Schedule
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.strategy import Replicas, make_replicas
from trainer.data.batches import batches
from trainer.data.dataset import Dataset, NestedArrays
from trainer.data.sources import load_dataset
from trainer.data.user_data import RandomAccess, own_dataset
from trainer.invariance.layers import depends_on_replicas
from trainer.models.construction import build_model
from trainer.run.training_setup import build_setup, set_precision_and_seed

BATCH = 16
KINDS = [
    "weighted",
    "rows",
    "batches",
    "tf_batches",
    *map(
        slow,
        (
            "tf_endless",
            "named_inputs",
            "batches_and_arrays",
            "windows",
            "list_of_rows",
            "tf_examples",
            "both",
        ),
    ),
]


def settings(data: str, model: str = "regression", *flags: str) -> TrainConfig:
    own = [
        f"--data=tests.own_data:{data}",
        f"--model=tests.own_data:{model}",
        "--precision=float64",
    ]
    return resolved(
        *own, f"--global_batch_size={BATCH}", "--steps=8", "--learning_rate=0.01", *flags
    )


def loaded(config: TrainConfig) -> Dataset:
    set_precision_and_seed(config)
    return load_dataset(config)


def steps_of(
    data: str, worker: int, workers: int, local: int, first_step: int, count: int
) -> list[Any]:
    """Returns the parts of these steps, (local * rows, …) each, from a fresh reading of the
    data."""
    config = settings(data)
    addresses = tuple(f"127.0.0.1:{port}" for port in range(1, workers + 1)) if workers > 1 else ()
    replicas = Replicas(
        None, ("CPU:0",) * local, BATCH // workers // local, BATCH, Cluster(addresses, worker)
    )
    dataset = loaded(config)
    found = batches(
        dataset.train, Schedule(dataset.train.count, BATCH, 1, 0), replicas, first_step
    ).take(count)
    with dataset.reading():
        return [
            tf.nest.map_structure(lambda leaf: leaf.numpy().reshape(-1, *leaf.shape[3:]), parts)
            for parts in found
        ]


def joined(workers: list[list[Any]]) -> list[Any]:
    """Returns what several workers read, as one worker would."""
    return [
        tf.nest.map_structure(lambda *leaves: np.concatenate(leaves), *step)
        for step in zip(*workers, strict=True)
    ]


def same(one: list[Any], other: list[Any]) -> None:
    for a, b in zip(one, other, strict=True):
        tf.nest.map_structure(assert_array_equal, a, b)


@parametrize("data", KINDS)
def test_steps_have_the_same_rows_on_replicas_workers_and_after_a_restart(data: str) -> None:
    alone = steps_of(data, 0, 1, 1, 0, 8)
    assert not all(
        np.array_equal(*pair) for pair in zip(*map(tf.nest.flatten, alone[:2]), strict=True)
    )
    same(alone, steps_of(data, 0, 1, 4, 0, 8))
    same(alone, joined([steps_of(data, worker, 2, 2, 0, 8) for worker in range(2)]))
    same(alone[5:], steps_of(data, 0, 1, 2, 5, 3))


def test_types_are_those_that_fit_passes() -> None:
    named = loaded(settings("named_inputs")).spec
    assert [leaf.dtype.name for leaf in tf.nest.flatten(named)] == [
        "int64",
        "float64",
        "float64",
        "bool",
        "float64",
    ]
    assert loaded(settings("masks")).spec[0].dtype == tf.uint8


def test_batches_end_each_epoch_once_and_leave_out_the_last_small_one() -> None:
    dataset = loaded(settings("batches"))
    train = dataset.train
    assert (train.count, train.left_out, dataset.evaluation and dataset.evaluation.count) == (
        48,
        2,
        21,
    )
    replicas = Replicas(None, ("CPU:0",), BATCH, BATCH)
    for _ in batches(train, Schedule(48, BATCH, 1, 0), replicas).take(7):
        pass
    # 3 begun and 2 ended, or one more: up to four steps are read ahead
    assert train._source.epochs in (8, 11)


@parametrize(
    "data, line",
    [
        (
            "uneven_windows",
            "a batch of its tf.data.Dataset has other lengths than the first one, float64 (3,) -> ",
        ),
        (
            "unseeded",
            (
                "two readings of its first examples differ: make the tf.data.Dataset inside the"
                " function, give its"
            ),
        ),
        (
            "made_outside",
            (
                "two readings of its first examples differ: make the tf.data.Dataset inside the"
                " function"
            ),
        ),
        ("taken", "two readings of the examples for evaluation give other rows"),
        ("breaks_at_7", "example 7 cannot be read: tests/own_data.py:"),
        (
            "other_batches",
            "PyDataset have 5 rows, but global_batch_size is 16: use --global_batch_size=5",
        ),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_before_training(data: str, line: str) -> None:
    with refused(line):
        loaded(settings(data))


def test_examples_that_are_drawn_train_as_in_fit_on_one_replica_alone(caplog: Log) -> None:
    one = settings("moody_rows")
    setup = build_setup(one, make_replicas(one))
    assert "as it draws at random: the same command gives other numbers each time" in caplog.text
    assert "training digest" not in setup.content  # the same command resumes
    for flags in (["--replicas=2"], ["--virtual_replicas=2"]):
        several = settings("moody_rows", "regression", *flags)
        with refused("differ, as it draws at random: draw by the number of the example"):
            build_setup(several, make_replicas(several))


@pytest.mark.exports
@SLOW
def test_a_model_of_a_fixed_batch_trains_and_is_saved_as_in_fit(tmp_path: Path) -> None:
    config = settings(
        "windows", "stateful", "--precision=float32", f"--job_dir={tmp_path}", "--steps=6"
    )
    run_job(config)
    trained = saved_model(tmp_path)
    dataset = loaded(config)
    expected = build_model(config, dataset)
    expected.optimizer.apply = type(expected.optimizer).apply.__get__(expected.optimizer)
    for x, y in steps_of("windows", 0, 1, 1, 0, 6):
        expected.train_on_batch(x, y)
    assert largest_difference(expected, trained) < 1e-5
    assert read(tmp_path / "result.json")["saved_model"].startswith("model.keras predicts")
    with refused("Expected batch size: 16 - Received batch size: 8"):
        run_steps(settings("windows", "stateful", "--replicas=2"), 1)


RAGGED = tf.ragged.constant([[1.0], [1.0, 2.0]])


class _Frame:
    """Is to NumPy what a DataFrame of pandas is: columns of different types become objects."""

    def __init__(self, **columns: Any) -> None:
        self.columns = [*columns]
        self.dtypes = [column.dtype for column in columns.values()]
        self._values = np.array([*columns.values()], object).T

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self._values


@parametrize(
    "returned, line",
    [
        (
            (RAGGED, np.zeros(2)),
            (
                "RaggedTensor: it must be an array, or a dict, list or tuple of arrays, as by"
                " .to_tensor()"
            ),
        ),
        (
            tf.data.Dataset.from_tensor_slices((RAGGED, [0.0, 0.0])),
            "pad them, by padded_batch or to_tensor(shape=…)",
        ),
        (
            ([[1.0, 2.0]] * 50, [0.0] * 50),
            "x is a list of lists: use np.array(…) for the rows of one input, or a tuple",
        ),
        (
            ({"a": np.zeros((50, 2)), "b": np.zeros((49, 2))}, np.zeros(50)),
            "the parts have different numbers of rows: x (50, 2), x (49, 2), y (50,)",
        ),
        (
            (_Frame(age=np.arange(2.0), city=np.array(["Rome", "Oslo"], object)), np.zeros(2)),
            (
                "x: its column 'city' holds object, so that rows are Python objects: make numbers"
                " of all columns"
            ),
        ),
        (
            (np.array([[1.0], [1.0, 2.0]], dtype=object), np.zeros(2)),
            "x holds Python objects, or rows of several lengths",
        ),
        ((np.zeros(2), [1.0, np.inf]), "y holds NaN or infinity, first in row 1"),
        (
            (np.zeros(2), np.ma.masked_equal([1.0, -9999.0], -9999.0)),
            "y is a masked array, whose masked values would be",
        ),
        (
            (np.zeros(2), np.array(["a", "b"])),
            "y holds text, first 'a', not numbers: number its classes from 0",
        ),
        (iter([(1.0, 2.0)]), "it returned a list_iterator, which can be read only once"),
        (
            (np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2)),
            "4 parts: return x, (x, y) or (x, y, sample_weight)",
        ),
        (
            ((np.zeros((20, 4)), np.zeros(20)), (np.zeros((20, 3)), np.zeros(20))),
            "an example for evaluation is (float32 (3,), float32 ()), but one for training",
        ),
    ],
    ids=[
        "ragged",
        "ragged rows",
        "lists",
        "uneven",
        "text in a frame",
        "objects",
        "infinity",
        "masked",
        "text",
        "iterator",
        "four parts",
        "other evaluation",
    ],
)
def test_what_cannot_be_trained_on_is_told_how_to_become_so(returned: Any, line: str) -> None:
    with refused(line):
        own_dataset(settings("arrays"), lambda config: returned)


X = np.zeros((BATCH, 7))
CLASSES = np.arange(BATCH)


@parametrize(
    "model, dataset, line",
    [
        (
            "tests.user_callbacks:build",
            Dataset("made", NestedArrays(X, CLASSES)),
            "it cannot be called with x of ",
        ),
        (
            "tests.own_data:classifier",
            Dataset("made", NestedArrays(X, CLASSES % 4), NestedArrays(X, CLASSES % 5)),
            "the model has 4 outputs: labels from 0 to 4: must be from 0 to 3",
        ),
    ],
    ids=["x", "labels to evaluate with"],
)
def test_other_shapes_and_labels_than_the_models_are_told(
    model: str, dataset: Dataset, line: str
) -> None:
    with refused(line):
        build_model(settings("arrays", "regression", f"--model={model}"), dataset)


def test_text_for_a_model_is_said_to_make_gpus_wait(monkeypatch: Patch, caplog: Log) -> None:
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])
    config = settings("sentences", "bag_of_words")
    build_model(config, loaded(config))
    assert (
        "GPUs have no kernel (RaggedTensorToTensor): they wait in each step; call its"
        in caplog.text
    )


def test_rows_of_another_shape_are_refused_when_they_are_read() -> None:
    with refused(
        "is (float64 (3,), float64 ()), but example 0 is (float64 (4,), float64 ()): all must have"
        " the same"
    ):
        for first in range(3):
            steps_of("ragged_rows", 0, 1, 1, first, 1)


def test_text_is_read_by_row_number() -> None:
    words, numbers = RandomAccess([("ab", 1), ("c", 2)], "data").gather(tf.constant([[1, 0]]))
    assert (words.numpy().tolist(), numbers.numpy().tolist()) == ([[b"c", b"ab"]], [[2, 1]])


def test_an_endless_data_set_needs_steps() -> None:
    own = [
        "--data=tests.own_data:tf_endless",
        "--model=tests.own_data:regression",
        f"--global_batch_size={BATCH}",
    ]
    with refused("unknown or infinite: give the length of the run with --steps"):
        load_dataset(resolved(*own, "--epochs=2"))


MODELS = [
    ("two_outputs", "named_inputs"),
    *(
        slow(*case)
        for case in (
            ("regression", "weighted"),
            ("segmenter", "masks"),
            ("regression", "tf_batches"),
            ("summed", "weighted"),
            ("multi_label", "several_labels"),
            ("classifier", "classes"),
        )
    ),
]


# Other models in two passes of each replica: tests/trainer/invariance/test_micro_batches.py
@parametrize("model, data", MODELS)
def test_two_replicas_give_the_numbers_of_one(model: str, data: str) -> None:
    (one, logs), (two, logs_of_two) = (
        run_steps(settings(data, model, f"--replicas={n}"), 8) for n in (1, 2)
    )
    agree = largest_difference(one, two) < 1e-12
    assert agree == (not depends_on_replicas(two, replicas=2))
    if agree:
        assert logs_of_two.means() == pytest.approx(logs.means(), rel=1e-10)


@parametrize("data", ["classes", "classes_as_floats"])
def test_class_weights_are_those_of_fit(data: str) -> None:
    flags = ("--class_weight=0:1,1:3", "--replicas=2")
    config = settings(data, "classifier", *flags)
    dataset = loaded(config)
    found, _ = run_steps(config, 3)
    rows = steps_of(data, 0, 1, 1, 0, 3)
    set_precision_and_seed(config)
    expected = build_model(config, dataset)
    expected.optimizer.apply = type(expected.optimizer).apply.__get__(expected.optimizer)
    for x, y in rows:
        expected.fit(
            x, y, batch_size=BATCH, class_weight={0: 1.0, 1: 3.0}, shuffle=False, verbose=0
        )
    assert largest_difference(expected, found) < 1e-12


@parametrize("weights, line", [("cat:2", "written as 0:1,1:6.5"), ("0:-1", "must be at least 0")])
def test_class_weights_that_cannot_be_read_are_refused(weights: str, line: str) -> None:
    with refused(line):
        settings("classes", "classifier", f"--class_weight={weights}")


def test_nan_in_x_is_named_when_the_loss_is_nan(tmp_path: Path) -> None:
    with refused("x holds NaN or infinity, first in row 5: fill or remove such rows first; step "):
        run_job(settings("nan_inputs", "regression", f"--job_dir={tmp_path}"))


def test_losses_of_layers_are_enough_to_train_on() -> None:
    assert run_steps(settings("arrays", "penalty_alone"), 2)[1].means()["loss"] > 0


@parametrize(
    "model, data, line, flags",
    [
        (
            "regression",
            "arrays",
            "class_weight: the targets are not one class each",
            ["--class_weight=0:2"],
        ),
        (
            "classifier",
            "classes",
            "class_weight=0:2.0,7:5.0: there is no class 7: there are 4, from 0 on",
            ["--class_weight=0:2,7:5"],
        ),
        (
            "classifier",
            "weighted_classes",
            "class_weight: the data have a sample_weight, and fit takes only one",
            ["--class_weight=0:2"],
        ),
        (
            "regression",
            "words",
            "x holds text, but no input of the model has dtype='string': turn text into",
            [],
        ),
        (
            "uncompiled",
            "arrays",
            "it is not compiled and has no train_step of its own: call model.compile(",
            [],
        ),
        (
            "without_loss",
            "arrays",
            "there is no loss to train on: pass loss=… to its compile()",
            [],
        ),
        ("flat_classifier", "masks", "its loss or metrics do not fit", []),
        (
            "flat_classifier",
            "classes",
            'these are numbers: use loss="sparse_categorical_crossentropy"',
            [],
        ),
        (
            "classifier",
            "several_labels",
            'these are one-hot: use loss="categorical_crossentropy"',
            [],
        ),
        (
            "classifier",
            "too_large_labels",
            "the model has 4 outputs: labels from 0 to 4: must be from 0 to 3",
            [],
        ),
    ],
)
def test_a_model_that_does_not_fit_its_data_is_refused(
    model: str, data: str, line: str, flags: list[str]
) -> None:
    with refused(line):
        run_steps(settings(data, model, *flags), 1)


def test_a_shuffled_data_set_is_read_alike_however_often_it_was_read_before() -> None:
    """A trial of XLA's steps reads the data once more on some numbers of replicas; TensorFlow
    shuffles each reading."""
    setup = build_setup(settings("tf_examples"), make_replicas(settings("tf_examples")))
    first, second = (list(setup.batches_from(2).take(4).as_numpy_iterator()) for _ in range(2))
    same(first, second)
