"""Tests what an evaluation says of each class: exact counts on any replicas, in JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Sequential, layers, losses
from numpy.random import default_rng

from tests.drill import read
from tests.fixtures import parametrize
from tests.support import run_job, small
from tests.trainer.measures.test_evaluation import setup_of
from trainer import evaluate
from trainer.base.run_files.job_files import finite
from trainer.measures.evaluation import MOST_CLASSES, confusion, counted_classes
from trainer.reporting.classification import Classification

CLASSES = 12


def test_the_numbers_are_those_of_their_definitions() -> None:
    draw = default_rng(1)
    outputs = draw.normal(size=(200, CLASSES))
    labels = draw.integers(0, CLASSES - 1, 200)
    counts = confusion(tf.constant(labels[:, None]), tf.constant(outputs)).numpy()
    expected = np.zeros((CLASSES, CLASSES))
    np.add.at(expected, (labels, outputs.argmax(axis=1)), 1)
    found = Classification(tuple("abcdefghijkl"), counts)
    content = found.content()
    right = np.diag(expected)
    assert content["confusion"] == expected.tolist()
    assert content["accuracy"] == right.sum() / 200
    assert [row["examples"] for row in content["classes"]] == expected.sum(axis=1).tolist()
    recall = [row["accuracy"] for row in content["classes"]]
    assert recall[:-1] == list(right[:-1] / expected.sum(axis=1)[:-1])
    assert finite(content)["classes"][-1]["accuracy"] is None
    assert [row["precision"] for row in content["classes"]] == list(right / expected.sum(axis=0))
    assert found.least_accurate(99) == sorted(
        zip("abcdefghijk", recall[:-1], strict=True), key=lambda row: row[1]
    )


@parametrize(
    "model, data, counts",
    [
        ("classifier", "classes", True),
        ("multi_label", "several_labels", False),
        ("two_outputs", "named_pair", False),
    ],
)
def test_counts_do_not_depend_on_replicas_remainders_or_batch(
    model: str, data: str, counts: bool
) -> None:
    """A user's own compiled classifier with integer labels has them; other models have none."""
    found = []
    for flags in ((), ("--replicas=4",)):
        _, evaluated = setup_of(model, data, *flags)
        values = evaluated()
        assert (evaluated.classes is not None) == bool(evaluated.class_count) == counts
        if not evaluated.classes:
            return
        assert evaluated.classes.accuracy == pytest.approx(values["val_accuracy"])
        found.append(json.dumps(finite(evaluated.classes.content())))
    assert found[0] == found[1]
    assert json.loads(found[0])["examples"] == 21


@parametrize(
    "classes, loss, counted",
    [
        (MOST_CLASSES, "sparse_categorical_crossentropy", MOST_CLASSES),
        (MOST_CLASSES + 1, "sparse_categorical_crossentropy", 0),
        (3, losses.SparseCategoricalCrossentropy(from_logits=True), 3),
        (3, losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1), 0),
    ],
)
def test_more_classes_than_a_matrix_has_and_a_loss_that_ignores_one_are_not_counted(
    classes: int, loss: Any, counted: int
) -> None:
    model = Sequential([Input((2,)), layers.Dense(classes)])
    model.compile(loss=loss)
    assert counted_classes(model) == counted


def test_a_run_and_the_command_write_the_same(tmp_path: Path) -> None:
    flags = ("--model=mlp", "--evaluation_fraction=0.1", "--steps=8", "--learning_rate=1e-3")
    run = run_job(
        small(
            *flags,
            f"--job_dir={tmp_path / 'run'}",
            "--tensorboard=false",
            "--checkpoint_every_steps=4",
        )
    )
    result, found = (read(run / name) for name in ("result.json", "classes.json"))
    about = {"formulas": 1, "examples": 180}
    assert result["classes"] == {"step": 8, **about, "file": "classes.json"}
    metrics = result["final"]["metrics"]
    assert metrics["val_accuracy"] == pytest.approx(found["accuracy"])
    assert found["classes"][-1]["name"] == "9"
    assert np.sum(found["confusion"]) == 180
    assert evaluate.main([str(run), f"--out={tmp_path / 'v.json'}"]) == 0
    stated = read(tmp_path / "v.json")
    assert read(tmp_path / stated["classes"]["file"])["confusion"] == found["confusion"]
