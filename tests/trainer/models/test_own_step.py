"""Tests train_steps of a user's own with optimizers of Keras: each gives two replicas the numbers
of one."""

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers, ops
from numpy.random import default_rng

from tests.support import largest_difference, resolved, run_steps, slow
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.data.dataset import Dataset
from trainer.invariance.step import current_step
from trainer.measures.evaluation import Evaluation
from trainer.reporting.progress import RunningMeans
from trainer.run.training_setup import build_setup


def table(config: TrainConfig) -> Any:
    draw = default_rng(0)
    x = draw.normal(size=(64, 6))
    return x, x[:, :1] - x[:, 1:2], draw.uniform(0.5, 2.0, 64)


class ForFit(keras.Model):
    """Has the train_step of Keras's guide, with its loss, a penalty on weights, and metrics."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, sample_weight = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted, sample_weight=sample_weight)
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted, sample_weight=sample_weight)
        return {metric.name: metric.result() for metric in self.metrics}


class WithStep(ForFit):
    """Divides by the global batch, as the contract of this package asks."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = data
        with tf.GradientTape() as tape:
            loss = current_step().mean(ops.square(self(x, training=True) - y))
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"squares": loss}


class Super(ForFit):
    """Adds to Keras's own train_step."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return keras.Model.train_step(self, data)


class Tracked(ForFit):
    """Keeps its loss in a metric of its own, named as Keras's loss tracker is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own_tracker = keras.metrics.Mean(name="loss")

    def logs(self, data: Any) -> tuple[Any, dict[str, Any]]:
        x, y, _ = data
        loss = ops.mean(ops.square(self(x, training=True) - y))
        self.own_tracker.update_state(loss)
        return loss, {"loss": self.own_tracker.result(), "mse": loss}

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss, logs = self.logs(data)
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return logs

    def test_step(self, data: Any) -> dict[str, Any]:
        return self.logs(data)[1]


def build(config: TrainConfig, dataset: Dataset, *, kind: str = "ForFit") -> keras.Model:
    x = keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(x)
    outputs = layers.Dense(1)(layers.BatchNormalization()(layers.Dropout(0.3)(hidden)))
    model = globals()[kind](x, outputs, name="table")
    reduction = "mean_with_sample_weight" if kind == "Super" else "sum_over_batch_size"
    loss = None if kind == "Tracked" else keras.losses.MeanSquaredError(reduction=reduction)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["mae"] if loss else None)
    return model


def settings(name: str, replicas: int) -> TrainConfig:
    own = [
        f"--model={__name__}:build",
        f"--kind={name}",
        f"--data={__name__}:table",
        "--global_batch_size=8",
    ]
    return resolved(*own, "--steps=6", f"--replicas={replicas}", "--precision=float64")


@pytest.mark.parametrize(
    ("name", "means"), [("WithStep", False), *(slow(name, True) for name in ("ForFit", "Super"))]
)
def test_two_replicas_give_the_numbers_of_one(name: str, means: bool) -> None:
    (alone, logs), (together, logs_of_two) = (
        run_steps(settings(name, replicas), 6) for replicas in (1, 2)
    )
    assert [getattr(model, "means_of_rows", False) for model in (alone, together)] == [means] * 2
    assert largest_difference(alone, together, smallest_norm=1e-2) < 1e-10
    assert logs_of_two.means() == pytest.approx(logs.means(), rel=1e-9)
    assert ({"squares"} if name == "WithStep" else {"loss", "mae"}) <= logs.means().keys()


@pytest.mark.slow
def test_a_loss_is_what_the_step_returns() -> None:
    """Keras's own loss tracker has the same name and is never updated. The 6 steps are in calls of
    1, 2 and 3."""
    config = settings("Tracked", 2)
    setup = build_setup(config, make_replicas(config))
    run = setup.step_runner()
    rows = setup.rows_from(0)
    means = RunningMeans(8)
    for first, count in ((0, 1), (1, 2), (3, 3)):
        means.add(run(rows, first, count), 1.0, timed=True)
    assert means.means()["loss"] == pytest.approx(means.means()["mse"], rel=1e-12)
    assert means.means()["mse"] > 0.1
    found = Evaluation(setup.model, setup.replicas, setup.dataset.train, 16, setup.dataset.as_fit)()
    assert found["val_loss"] == pytest.approx(found["val_mse"], rel=1e-12)
    assert found.keys() == {"val_loss", "val_mse"}
