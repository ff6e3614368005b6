"""Tests that losses over the rows of all replicas have the values and gradients of one device."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, layers, losses, optimizers

from tests.fixtures import SLOW, parametrize
from tests.own_data import regression, weighted
from tests.support import largest_difference, refused, resolved, run_steps, slow
from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.data.dataset import Dataset
from trainer.invariance.losses import root_mean_square
from trainer.invariance.step import current_step
from trainer.measures.evaluation import evaluation
from trainer.run.training_setup import build_setup


def _errors(y: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
    return tf.reshape(found, [-1]) - tf.reshape(y, [-1])


def global_root(config: TrainConfig, dataset: Dataset) -> Model:
    model = regression(config, dataset)
    # Not Adam, which hides a wrong factor of the gradient.
    model.compile(optimizers.SGD(0.1), loss=lambda y, found: root_mean_square(_errors(y, found)))
    return model


def plain_root(config: TrainConfig, dataset: Dataset) -> Model:
    """Has the formula of one device, which takes each replica's rows alone."""
    model = regression(config, dataset)
    loss = lambda y, found: tf.sqrt(tf.reduce_mean(tf.square(_errors(y, found))))  # noqa: E731
    model.compile(optimizers.SGD(0.1), loss=loss)
    return model


def settings(model: str, *flags: str, data: str = "pair") -> TrainConfig:
    own = (f"--model={__name__}:{model}", f"--data=tests.own_data:{data}", "--global_batch_size=16")
    return resolved(*own, "--steps=5", "--precision=float64", *flags)


@parametrize("data", ["weighted_pair", slow("pair")])
def test_a_root_mean_square_spans_all_replicas(data: str) -> None:
    one_device, logs = run_steps(settings("plain_root", "--replicas=1", data=data), 5)
    model, found = run_steps(settings("global_root", "--replicas=2", data=data), 5)
    assert largest_difference(one_device, model) < 1e-10
    assert found.means() == pytest.approx(logs.means(), rel=1e-10)
    apart, _ = run_steps(settings("plain_root", "--replicas=2", data=data), 5)
    assert largest_difference(one_device, apart) > 1e-5


@SLOW  # how a mean is evaluated: tests/trainer/measures/test_evaluation.py
def test_a_root_mean_square_is_evaluated_as_on_one_device() -> None:
    found = []
    for name in ("plain_root", "global_root"):
        config = settings(name, "--replicas=2")
        setup = build_setup(config, make_replicas(config))
        evaluate = evaluation(setup.model, setup.replicas, setup.dataset, 8)
        assert evaluate
        found.append(evaluate()["val_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-10)


def test_a_root_mean_square_is_refused_in_micro_batches() -> None:
    for replicas, cut in (
        (1, "micro_batches=2"),
        (2, "micro_batches=2"),
        (2, "virtual_replicas=2"),
    ):
        with pytest.raises(UserError, match=rf"^{cut}: root_mean_square needs all rows .*\Z"):
            run_steps(settings("global_root", f"--replicas={replicas}", f"--{cut}"), 1)


def equal_weights(config: TrainConfig) -> Any:
    x, y, weight = weighted(config)
    return x, y, np.full_like(weight, 0.5)


def test_a_loss_of_one_number_is_right_with_sample_weights() -> None:
    flags = (
        "--model=tests.own_data:scalar_loss",
        f"--data={__name__}:equal_weights",
        "--global_batch_size=16",
    )
    ways = (["--replicas=1"], ["--replicas=2"], ["--replicas=2", "--micro_batches=2"])
    (one, logs), *others = (
        run_steps(resolved(*flags, "--precision=float64", *way), 3) for way in ways
    )
    for model, found in others:
        assert largest_difference(one, model) < 1e-10
        assert found.means() == pytest.approx(logs.means(), rel=1e-10)


class Accumulates(Model):
    """Takes passes in a train_step of its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        def one_micro_batch(x: Any, y: Any, weight: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True), sample_weight=weight)
            return loss, tape.gradient(loss, self.trainable_variables)

        loss, gradients = current_step().accumulate(
            one_micro_batch, *keras.utils.unpack_x_y_sample_weight(data)
        )
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def accumulates(config: TrainConfig, dataset: Dataset) -> Model:
    x = Input(dataset.spec[0].shape)
    model = Accumulates(x, layers.Dense(1)(x))
    model.compile(
        optimizers.SGD(0.05),
        losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    )
    return model


def test_a_count_is_refused_in_a_pass_of_a_users_own_step() -> None:
    one, two = (
        run_steps(settings("accumulates", f"--replicas={count}", data="weighted"), 3)
        for count in (1, 2)
    )
    assert largest_difference(one[0], two[0]) < 1e-10
    for cut in ("micro_batches=2", "virtual_replicas=2"):
        with refused(f"{cut}: a loss within current_step().accumulate divides by a count"):
            run_steps(settings("accumulates", "--replicas=1", f"--{cut}", data="weighted"), 1)
