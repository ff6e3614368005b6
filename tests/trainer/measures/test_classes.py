"""Tests what an evaluation says of each class: exact counts on any replicas, in JSON."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import fresh_collectives, run_job, small
from tests.trainer.measures.test_evaluation import setup_of
from trainer import evaluate
from trainer.base.run_files.records import finite
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Arrays, Dataset
from trainer.measures.class_counts import ClassCounts, class_counts
from trainer.reporting.classification import BINS, MOST_IN_MATRIX, Classification

CLASSES = 12


def many_classes(config: TrainConfig) -> Dataset:
    """Returns images of twelve classes, of which the last has no example for evaluation."""
    draw = np.random.default_rng(0)
    labels = (np.arange(96) % CLASSES).astype(np.int32)
    images = np.clip(20 * labels[:, None, None, None] + draw.integers(-40, 40, (96, 16, 16, 1)), 0, 255)
    train = Arrays(images.astype(np.uint8), labels)
    held = np.flatnonzero(labels[:61] < CLASSES - 1)
    names = tuple(f"class {'abcdefghijkl'[number]}" for number in range(CLASSES))
    return Dataset("many", train, Arrays(train.images[held], labels[held]), names)


def counted(labels: Any, outputs: Any, *, logits: bool = True) -> Classification:
    names = tuple(map(str, range(outputs.shape[1])))
    counts = ClassCounts(names, logits=logits)
    found = {name: count.numpy() for name, count in counts.of_batch(tf.constant(labels), tf.constant(outputs)).items()}
    assert {name: count.shape for name, count in found.items()} == counts.shapes
    return Classification(names, **found)


def test_the_numbers_are_those_of_their_definitions() -> None:
    draw = np.random.default_rng(1)
    outputs, labels = draw.normal(size=(200, CLASSES)) * 2, draw.integers(0, CLASSES, 200)
    found = counted(labels[:, None], outputs)
    probabilities = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    predicted, sure = probabilities.argmax(axis=1), probabilities.max(axis=1)
    confusion = np.zeros((CLASSES, CLASSES))
    np.add.at(confusion, (labels, predicted), 1)
    content = found.content()
    assert content["confusion"] == confusion.tolist()
    assert [one["accuracy"] for one in content["classes"]] == list(np.diag(confusion) / confusion.sum(axis=1))
    assert [one["precision"] for one in content["classes"]] == list(np.diag(confusion) / confusion.sum(axis=0))
    best = np.argsort(outputs, axis=1)[:, -5:]
    assert found.scalars()["top_5_accuracy"] == np.mean(
        [label in five for label, five in zip(labels, best, strict=True)]
    )
    expected = 0.0
    for low in np.arange(BINS) / BINS:
        inside = (sure > low) & (sure <= low + 1 / BINS)
        if inside.any():
            gap = np.mean(predicted[inside] == labels[inside]) - sure[inside].mean()
            expected += inside.mean() * abs(gap)
    assert found.calibration_error == pytest.approx(expected, abs=1e-6)


def test_probabilities_and_bins_at_their_edges() -> None:
    """A confidence of 0.6 is in bin 9 of 15, of 1 in the last one."""
    found = counted([0, 1, 1], np.array([[1.0, 0.0], [0.4, 0.6], [0.6, 0.4]]), logits=False)
    assert [int(rows) for rows in found.bins[0]] == [0] * 8 + [2] + [0] * 5 + [1]
    assert found.calibration_error == pytest.approx((abs(1 - 1.2) + 0) / 3, abs=1e-6)
    assert "top_5_accuracy" not in found.scalars()
    assert found.least_accurate(5) == [("1", 0.5), ("0", 1.0)]


@pytest.mark.parametrize(("model", "data", "counts"), [
    ("classifier", "classes", True), ("multi_label", "several_labels", False), ("two_outputs", "named_pair", False),
])  # fmt: skip
def test_counts_do_not_depend_on_replicas_remainders_or_batch(model: str, data: str, counts: bool) -> None:
    """A user's own compiled classifier with integer labels has them; other models have none."""
    found = []
    for flags in (
        (),
        ("--replicas=4",),
        ("--evaluation_batch_size=21",),
        ("--evaluation_batch_size=4", "--replicas=2"),
    ):
        _, evaluated = setup_of(model, data, *flags)
        values = evaluated()
        assert (evaluated.classes is not None) == evaluated.counts_classes == counts
        if not evaluated.classes:
            return
        assert evaluated.classes.accuracy == pytest.approx(values["val_accuracy"])
        found.append(json.dumps(finite(evaluated.classes.content())))
    assert found == found[:1] * 4
    assert json.loads(found[0])["examples"] == 21


def test_more_classes_than_a_matrix_has_are_counted_without_one() -> None:
    classes = MOST_IN_MATRIX + 1
    found = counted(np.arange(5), np.eye(5, classes, dtype=np.float32))
    assert (found.confusion, found.accuracy, len(found.content()["classes"])) == (None, 1.0, classes)


def test_a_loss_that_ignores_a_class_is_not_counted() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    for ignored, counts in ((None, True), (-1, False)):
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignored))
        assert (class_counts(model, ("one",)) is not None) == counts


def test_a_run_and_the_command_write_the_same(tmp_path: Path) -> None:
    flags = ("--model=mlp", f"--data={__name__}:many_classes", "--steps=8", "--learning_rate=1e-3", "--replicas=2")
    run = run_job(small(*flags, f"--job_dir={tmp_path / 'run'}", "--tensorboard=false", "--checkpoint_every_steps=4"))
    result, found = (json.loads((run / name).read_text()) for name in ("result.json", "classes.json"))
    about = {"formulas": 1, "examples": 56, "calibration_bins": 15}
    assert result["classes"] == {"step": 8, **about, "file": "classes.json"}
    metrics = result["final"]["metrics"]
    assert metrics["val_accuracy"] == pytest.approx(found["accuracy"])
    assert metrics["val_calibration_error"] == found["calibration_error"]
    assert metrics["val_top_5_accuracy"] == found["top_5_accuracy"]
    assert found["classes"][-1]["name"] == "class l"
    assert found["classes"][-1]["accuracy"] is None
    assert np.sum(found["confusion"]) == 56
    fresh_collectives()
    assert evaluate.main([str(run), f"--out={tmp_path / 'v.json'}"]) == 0
    stated = json.loads((tmp_path / "v.json").read_text())
    assert stated["values"]["calibration_error"] == pytest.approx(found["calibration_error"], abs=1e-6)
    assert json.loads((tmp_path / stated["classes"]["file"]).read_text())["confusion"] == found["confusion"]
