"""Metrics live for an epoch, as in `fit`: however many steps a call to the device has, and after a
resume."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Model, Sequential, initializers, layers, ops, optimizers, saving
from numpy.random import default_rng
from numpy.testing import assert_allclose

from tests.drill import read
from tests.fixtures import parametrize
from tests.own_data import Largest
from tests.support import in_float64, read_lines, resolved, run_job, slow

# six steps an epoch
EPOCHS = 3
ROWS = 48
BATCH = 8


def network() -> Sequential:
    first, second = (initializers.GlorotUniform(seed) for seed in (1, 2))
    hidden = layers.Dense(8, "tanh", kernel_initializer=first)
    return Sequential([hidden, layers.Dense(1, kernel_initializer=second)])


class OwnStep(Model):
    """Weighs its loss by a metric so far, and keeps it in one named as Keras's own loss tracker,
    which it never updates."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.network = network()
        self.share = keras.metrics.Mean(name="share")
        self.total = keras.metrics.Mean(name="loss")
        self.resets = self.add_weight(shape=(), initializer="zeros", trainable=False, name="resets")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.network(inputs, training=training)

    def logs_of(self, x: Any, y: Any) -> tuple[Any, dict[str, Any]]:
        high = ops.cast(y > 1, self.compute_dtype)
        self.share.update_state(high)
        weight = ops.where(high > 0, 1.0 / (ops.cast(self.share.result(), high.dtype) + 0.1), 1.0)
        loss = ops.mean(weight * ops.square(self(x, training=True) - y))
        self.total.update_state(loss, sample_weight=1 + ops.mean(high))
        return loss, {"loss": self.total.result(), "share": self.share.result()}

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss, logs = self.logs_of(*data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return logs

    def test_step(self, data: Any) -> dict[str, Any]:
        return self.logs_of(*data)[1]

    def reset_metrics(self) -> None:
        super().reset_metrics()
        if not self.stop_training:  # each epoch, as an annealed weight of a loss
            self.resets.assign_add(1.0)


def build(config: Any, dataset: Any, *, kind: str = "own_step") -> Model:
    metrics = None
    model = OwnStep()
    if kind == "plain":
        model = network()
        metrics = [Largest(), "mae", keras.metrics.RootMeanSquaredError()]
    model(np.zeros((1, 4)))
    model.compile(optimizers.SGD(1e-2), "mse", metrics=metrics)
    return model


def batches() -> Any:
    x = default_rng(0).normal(size=(ROWS, 4))
    return tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True) + 0.5)).batch(BATCH)


def data(config: Any) -> Any:
    return batches(), batches().take(2)


def run(
    folder: Path, kind: str, *flags: str, steps: int = EPOCHS * ROWS // BATCH
) -> dict[str, Any]:
    """Returns the history of a run, its lines of stats.jsonl, and its weights."""
    run_job(
        resolved(
            f"--model={__name__}:build",
            f"--kind={kind}",
            f"--data={__name__}:data",
            f"--steps={steps}",
            "--precision=float64",
            f"--job_dir={folder}",
            f"--global_batch_size={BATCH}",
            "--tensorboard=false",
            *flags,
        )
    )
    lines = read_lines(folder / "stats.jsonl")
    model = saving.load_model(
        folder / "model" / "model.keras", compile=False, custom_objects={"OwnStep": OwnStep}
    )
    return {
        "history": read(folder / "result.json")["history"],
        "reports": [line for line in lines if line["kind"] == "report"],
        "weights": [weight.tolist() for weight in model.get_weights()],
    }


@parametrize("kind", ["own_step", "plain"])
def test_metrics_live_for_an_epoch(tmp_path: Path, kind: str) -> None:
    in_float64()
    model = build(None, None, kind=kind)
    expected = model.fit(
        batches(), epochs=EPOCHS, validation_data=batches().take(2), shuffle=False, verbose=0
    ).history
    runs = [
        run(tmp_path / f"by-{every}", kind, f"--report_every_steps={every}") for every in (1, 50)
    ]
    for found in runs:
        assert expected.keys() <= found["history"].keys()
        for name, values in expected.items():
            assert_allclose(found["history"][name], values, rtol=1e-6, err_msg=name)
        assert found["history"] == runs[0]["history"]
        assert found["weights"] == runs[0]["weights"]


def test_a_report_is_of_its_steps(tmp_path: Path) -> None:
    by_step, by_four = (
        run(tmp_path / f"by-{n}", "plain", f"--report_every_steps={n}")["reports"] for n in (1, 4)
    )
    for number, report in enumerate(by_four[:4]):
        steps = by_step[4 * number : 4 * number + 4]
        mean = np.mean([line["metrics"]["mae"] for line in steps])
        assert report["metrics"]["mae"] == pytest.approx(mean, rel=1e-5)
    largest = [line["metrics"]["largest"] for line in by_step]
    assert largest[:6] == sorted(largest[:6])  # of the epoch so far, as a maximum does not add up


@parametrize("kind, replicas", [("own_step", 1), slow("plain", 2)])
def test_a_resumed_epoch_has_the_numbers_of_a_calm_one(
    tmp_path: Path, kind: str, replicas: int
) -> None:
    flags = (f"--replicas={replicas}", "--allow_replica_dependence")
    calm = run(tmp_path / "calm", kind, *flags)
    folder = tmp_path / "parts"
    run(folder, kind, *flags, steps=9)
    resumed = run(folder, kind, *flags)
    assert resumed["history"] == calm["history"]
    assert resumed["weights"] == calm["weights"]
