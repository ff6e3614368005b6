"""`fit` of a compiled Keras model trains it in the caller's process, with the numbers of
`keras.Model.fit`."""

import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.deploy.conftest import error_of
from tests.fixtures import Capture, Json
from vertex_trainer import fit

X = np.random.default_rng(0).normal(size=(37, 4))
Y = X.sum(1, keepdims=True)
DATA: Json = {"epochs": 3, "batch_size": 10, "shuffle": False, "validation_split": 0.2}


def compiled(kind: type[keras.Model] = keras.Model) -> keras.Model:
    inputs = keras.Input((4,), dtype="float64")
    hidden = keras.layers.Dense(8, "tanh", dtype="float64")(inputs)
    model = kind(inputs, keras.layers.Dense(1, dtype="float64")(hidden))
    model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    return model


def twin(model: keras.Model) -> keras.Model:
    other = compiled(type(model))
    other.set_weights(model.get_weights())
    return other


def same(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


def same_weights(model: keras.Model, expected: keras.Model) -> None:
    for weight, value in zip(model.get_weights(), expected.get_weights(), strict=True):
        same(weight, value)


@pytest.mark.parametrize("replicas", [1, 2])
def test_two_calls_have_the_numbers_of_keras_and_the_model_is_trained(
    replicas: int, capsys: Capture
) -> None:
    model = compiled()
    expected = twin(model)
    for call in range(2):  # the second goes on with the weights and the optimizer of the first
        history = expected.fit(X, Y, verbose=0, **DATA).history
        done = fit(
            model, X, Y, replicas=replicas, progress=bool(call), job_dir=f"runs/{call}", **DATA
        )
        for name, values in history.items():
            same(done.history[name], values)
        same_weights(model, expected)
        assert ("epoch 3/3" in capsys.readouterr().out) == bool(call)
    assert done.result.state == "done"
    assert Path("runs/1/model/model.keras").exists()
    assert done.cost == 0.0


def test_ctrl_c_saves_and_the_same_call_goes_on() -> None:
    model = compiled()
    expected = twin(model)
    expected.fit(X, Y, verbose=0, **DATA)
    interrupted = twin(model)

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="the state is saved: the same call resumes"):
        fit(interrupted, X, Y, job_dir="runs/stopped", callbacks=[Interrupt()], **DATA)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    fit(model, X, Y, job_dir="runs/stopped", **DATA)
    same_weights(model, expected)


def test_the_same_call_with_more_epochs_goes_on(capsys: Capture) -> None:
    model = compiled()
    expected = twin(model)
    expected.fit(X, Y, verbose=0, **{**DATA, "epochs": 5})
    fit(twin(model), X, Y, job_dir="runs/longer", **DATA)
    fit(model, X, Y, job_dir="runs/longer", **{**DATA, "epochs": 5})
    assert "resumes at step 9" in capsys.readouterr().out
    same_weights(model, expected)


class OwnInit(keras.Model):
    def __init__(self, inputs: Any, outputs: Any) -> None:
        super().__init__(inputs, outputs)

    def get_config(self) -> Json:
        raise NotImplementedError("OwnInit has no config")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"on": "l4x1"}, "on=l4x1: a model of this process stays in it: name functions"),
        (
            {"uncompiled": True},
            "fit: the model is not compiled: call model.compile(optimizer, loss=…) first",
        ),
        (
            {"epoch": 3},
            "unknown keyword epoch; did you mean 'epochs'? Keywords for a model of this",
        ),
        ({"replicas": "two"}, "replicas='two' must be a whole number"),
        (
            {"replicas": 2},
            "model=OwnInit: several replicas train a copy, which Keras cannot make of its config",
        ),
    ],
)
def test_what_is_refused(options: Json, line: str) -> None:
    model = (
        keras.Sequential([keras.layers.Dense(1)])
        if options.pop("uncompiled", False)
        else compiled(OwnInit)
    )
    assert line in error_of(fit, model, X, Y, **options)
