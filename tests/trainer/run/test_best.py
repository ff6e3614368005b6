"""Tests that the best checkpoint and early stopping only compare comparable values."""

import json
from typing import Any

import numpy as np
from keras import Input, Model, Sequential, callbacks, layers, metrics

from tests.fixtures import parametrize
from tests.support import refused, small
from trainer.base.run_files.job_files import finite
from trainer.run.run_state import Best
from trainer.training.callback_states import CallbackStates
from trainer.training.callbacks import EarlyStopping, stop_reason

NAN = float("nan")
OWN = "--model=tests.models:classifier"  # the values of a named model are checked earlier


def kept(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state as a checkpoint restores it."""
    return json.loads(json.dumps(finite(state)))


@parametrize(
    "others, monitors, first, later",
    [
        (("--best_metric=val_loss",), [], {"val_accuracy": 0.9}, {"val_loss": 2.3}),
        ((), [EarlyStopping("val_loss", 1)], {"val_accuracy": 0.9}, {"val_loss": 2.3}),
        (
            (),
            [callbacks.ModelCheckpoint("best.keras", "val_own", save_best_only=True, mode="min")],
            {"val_accuracy": 0.9},
            {"val_own": 2.3, "val_accuracy": 0.1},
        ),
        (("--fid_features=mine.keras", "--fid_every_steps=4"), [], {"fid": 10.0}, {"fid": 90.0}),
        (("--fid_samples=50", "--fid_every_steps=4"), [], {"fid": 10.0}, {"fid": 90.0}),
    ],
)
def test_the_best_of_another_measure_starts_from_scratch(
    others: tuple[str, ...],
    monitors: list[callbacks.Callback],
    first: dict[str, float],
    later: dict[str, float],
) -> None:
    before = Best(small(OWN), Model())
    changed = Best(small(OWN, *others), Model(), monitors)
    before.consider(first, 10)
    changed.resume(kept(before.state))
    changed.consider(later, 20)
    assert (changed.state["step"], changed.improved) == (20, True)


@parametrize(
    "name, values, step",
    [
        ("val_accuracy", [0.5, 0.7, 0.6], 1),
        ("val_loss", [2.0, 3.0, 1.0], 2),
        ("fid", [NAN, 9.0, 10.0], 1),
    ],
)
def test_the_best_is_found_over_restarts_and_is_never_nan(
    name: str, values: list[float], step: int
) -> None:
    undisturbed = Best(small(OWN, f"--best_metric={name}"), Model())
    state = {}
    for at, value in enumerate(values):
        undisturbed.consider({name: value}, at)
        resumed = Best(small(OWN, f"--best_metric={name}"), Model())
        resumed.resume(state)
        resumed.consider({name: value}, at)
        state = kept(resumed.state)
    assert undisturbed.state["step"] == state["step"] == step


def classifier() -> Model:
    """Returns a compiled model, called once so that its metrics exist."""
    model = Sequential([Input((2,)), layers.Dense(1, activation="sigmoid")])
    model.compile(loss="binary_crossentropy", metrics=["acc", "mse", metrics.AUC(name="auc")])
    model.train_on_batch(np.zeros((2, 2)), np.array([[0.0], [1.0]]))
    return model


def began(monitor: str, model: Model, patience: int = 2) -> EarlyStopping:
    stopping = EarlyStopping(monitor, patience)
    stopping.set_model(model)
    model.stop_training = False
    stopping.on_train_begin()
    return stopping


def stops_after(stopping: EarlyStopping, values: list[float]) -> int | None:
    for epoch, value in enumerate(values):
        stopping.on_train_batch_end(1, {stopping.monitor: value})
        stopping.on_epoch_end(epoch, {stopping.monitor: value})
        if stopping.model.stop_training:
            why = stop_reason([stopping])
            assert why.startswith("EarlyStopping: ")
            return epoch
    return None


@parametrize(
    "monitor, values, last",
    [
        *((monitor, [1.0, 2.0, 3.0, 4.0], None) for monitor in ("acc", "auc", "val_accuracy")),
        *((monitor, [4.0, 3.0, 2.0, 1.0], 2) for monitor in ("acc", "auc", "val_accuracy")),
        *((monitor, [1.0, 2.0, 3.0, 4.0], 2) for monitor in ("mse", "loss", "critic_loss")),
        *((monitor, [4.0, 3.0, 2.0, 1.0], None) for monitor in ("mse", "loss", "critic_loss")),
        # NaN is no improvement, and anything improves on it.
        ("loss", [NAN, NAN, 1.0], 1),
        ("loss", [NAN, 3.0, 2.0, NAN, 1.0, 1.5, NAN], 6),
        ("loss", [1.0, NAN, NAN], 2),
    ],
)
def test_early_stopping_knows_which_way_is_better(
    monitor: str, values: list[float], last: int | None
) -> None:
    assert stops_after(began(monitor, classifier()), values) == last


def test_early_stopping_refuses_what_has_no_better_side_after_the_first_call() -> None:
    with refused("it is unknown whether higher or lower is better: use a loss"):
        began("wasserstein_distance", Model()).on_train_batch_end(1, {"wasserstein_distance": 1.0})


@parametrize("monitor, continues", [("loss", True), ("accuracy", False)])
def test_early_stopping_starts_from_scratch_with_another_value(
    monitor: str, continues: bool
) -> None:
    before = began("loss", Model(), patience=9)
    after = began(monitor, Model(), patience=9)
    states = CallbackStates([before])
    states.begin()
    stops_after(before, [2.0, 1.0, 3.0])
    state, arrays = states.changed()
    CallbackStates([after]).restore(kept(state), arrays)
    assert (after.wait, after.best) == ((1, 1.0) if continues else (0, None))
    assert after.monitor == monitor
