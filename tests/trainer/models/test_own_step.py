"""Tests train_steps of a user's own with optimizers of Keras: each gives two replicas the numbers
of one."""

from typing import Any

import pytest
import tensorflow as tf
from keras import Input, Model, layers, losses, ops, optimizers
from numpy.random import default_rng

from tests.fixtures import parametrize
from tests.support import largest_difference, resolved, run_steps, slow
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.invariance.step import current_step


def table(config: TrainConfig) -> Any:
    draw = default_rng(0)
    x = draw.normal(size=(64, 6))
    return x, x[:, :1] - x[:, 1:2], draw.uniform(0.5, 2.0, 64)


class ForFit(Model):
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
        return Model.train_step(self, data)


def build(config: TrainConfig, dataset: Dataset, *, kind: str = "ForFit") -> Model:
    x = Input((6,))
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(x)
    outputs = layers.Dense(1)(layers.BatchNormalization()(layers.Dropout(0.3)(hidden)))
    model = globals()[kind](x, outputs, name="table")
    reduction = "mean_with_sample_weight" if kind == "Super" else "sum_over_batch_size"
    loss = losses.MeanSquaredError(reduction=reduction)
    model.compile(optimizers.Adam(1e-2), loss, metrics=["mae"])
    return model


def settings(name: str, replicas: int) -> TrainConfig:
    own = [
        f"--model={__name__}:build",
        f"--kind={name}",
        f"--data={__name__}:table",
        "--global_batch_size=8",
    ]
    return resolved(*own, "--steps=6", f"--replicas={replicas}", "--precision=float64")


@parametrize(
    "name, means", [("WithStep", False), *(slow(name, True) for name in ("ForFit", "Super"))]
)
def test_two_replicas_give_the_numbers_of_one(name: str, means: bool) -> None:
    (alone, logs), (together, logs_of_two) = (
        run_steps(settings(name, replicas), 6) for replicas in (1, 2)
    )
    assert [getattr(model, "means_of_rows", False) for model in (alone, together)] == [means] * 2
    assert largest_difference(alone, together, smallest_norm=1e-2) < 1e-10
    assert logs_of_two.means() == pytest.approx(logs.means(), rel=1e-9)
    assert ({"squares"} if name == "WithStep" else {"loss", "mae"}) <= logs.means().keys()
