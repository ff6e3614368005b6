"""Tests that what callbacks have changed goes on after a resume, as in a run that was never
interrupted."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import Input, Model, Sequential, layers, optimizers, saving
from keras.callbacks import Callback
from numpy.random import default_rng

from tests import workers
from tests.drill import read
from tests.fixtures import SLOW, Log
from tests.support import resolved, run_job, saved_model
from trainer.base.errors import DONE
from trainer.training.callback_states import AttributeValue, CallbackStates, decoded, drop_epochs

# four steps an epoch
EPOCHS = 8
ROWS = 32
BATCH = 8


class Best(Callback):
    """Keeps state of all kinds, as users do."""

    def __init__(self, patience: int = 1) -> None:
        super().__init__()
        self.patience = patience
        self.losses: list[Any] = []
        self.file: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.lowest = float("inf")
        self.by_epoch = {}
        self.sums = np.zeros(2)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        loss = logs["loss"]
        self.lowest = min(self.lowest, loss)
        self.by_epoch[epoch] = (loss, {"odd"} if epoch % 2 else set())
        self.losses.append(np.float64(loss))
        self.sums += loss
        self.file = open(__file__)  # noqa: SIM115 (a callback that holds a file)
        self.file.close()
        SEEN[epoch] = (
            self.lowest,
            dict(self.by_epoch),
            [*map(float, self.losses)],
            self.sums.tolist(),
        )


SEEN: dict[int, Any] = {}


class Killer(Callback):
    """Kills its process in the middle of an epoch, once, if a file asks for it."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == 4 * 5 + 2 and self.mark.exists():
            self.mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def build(config: Any, dataset: Any) -> Model:
    model = Sequential([Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)])
    model.compile(optimizers.Adam(0.3), "mse")  # a rate at which the loss goes up and down
    return model


def data(config: Any) -> Any:
    x = default_rng(0).normal(size=(ROWS, 3))
    return (x, x.sum(1, keepdims=True)), (x[:8], np.abs(x[:8]).sum(1, keepdims=True))


def callbacks(config: Any) -> list[Any]:
    folder = Path(config.job_dir)
    return [
        keras.callbacks.ReduceLROnPlateau(
            monitor="val_loss", factor=0.5, patience=1, min_delta=1e-3
        ),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=4, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(
            str(folder / "best.keras"), monitor="val_loss", save_best_only=True
        ),
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
        keras.callbacks.BackupAndRestore(str(folder / "backup")),
        Best(),
        Killer(folder / "kill"),
    ]


FLAGS = [
    *(
        f"--{name}={__name__}:{function}"
        for name, function in (("model", "build"), ("data", "data"), ("callbacks", "callbacks"))
    ),
    f"--global_batch_size={BATCH}",
    "--precision=float64",
    "--tensorboard=false",
    "--checkpoint_every_steps=3",
]


def trained(folder: Path, *parts: int) -> dict[str, Any]:
    """Returns what a run leaves that ends, and goes on, after each of these numbers of steps."""
    SEEN.clear()
    for steps in parts:
        run_job(resolved(*FLAGS, f"--steps={steps}", f"--job_dir={folder}"))
    return left_by(folder)


def left_by(folder: Path) -> dict[str, Any]:
    """Returns what a run leaves."""
    result = read(folder / "result.json")
    model = saved_model(folder)
    best = saving.load_model(folder / "best.keras", compile=False)
    rows = (folder / "log.csv").read_text().splitlines()
    return {
        "history": result["history"],
        "steps": result["steps"],
        "seen": dict(SEEN),
        "rows": len(rows),
        "weights": [
            weight.tobytes() for network in (model, best) for weight in network.get_weights()
        ],
    }


def test_an_interrupted_run_ends_as_one_that_never_was(tmp_path: Path, caplog: Log) -> None:
    calm = trained(tmp_path / "calm", 4 * EPOCHS)
    parts = trained(tmp_path / "parts", 6, 15, 4 * EPOCHS)
    for name, values in calm.pop("history").items():
        assert parts["history"][name] == pytest.approx(values, rel=1e-12)
    assert {name: parts[name] for name in calm} == calm
    assert not (tmp_path / "parts" / "backup").exists()
    assert "callbacks: BackupAndRestore is left out" in caplog.text
    assert "callbacks: Best: file starts afresh" in caplog.text
    assert "CSVLogger" not in caplog.text


@SLOW
def test_a_killed_run_ends_as_a_calm_one_bit_by_bit(tmp_path: Path) -> None:
    for name, ends in (("calm", [DONE]), ("killed", [-signal.SIGKILL, DONE])):
        folder = tmp_path / name
        folder.mkdir()
        if name == "killed":
            (folder / "kill").touch()
        flags = [*FLAGS, f"--epochs={EPOCHS}", f"--job_dir={folder}"]
        assert [workers.run(1, flags, tmp_path / f"{name}.log")[0] for _ in ends] == ends
    calm, killed = (left_by(tmp_path / name) for name in ("calm", "killed"))
    assert len({*calm["history"]["learning_rate"]}) > 1
    assert killed == calm


def test_rows_of_epochs_that_are_trained_again_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("epoch,loss\n7,0.1\n0,0.3\n1,0.2\n2,0.1\n")  # the first row is another run's
    drop_epochs(file, ",", 1)
    assert file.read_text() == "epoch,loss\n7,0.1\n0,0.3\n"
    drop_epochs(tmp_path / "none.csv", ",", 1)


def test_settings_are_those_of_the_new_command() -> None:
    before = Best(patience=1)
    after = Best(patience=7)
    states = CallbackStates([before])
    before.on_train_begin()
    states.begin()
    before.on_epoch_end(0, {"loss": 0.5})
    state, arrays = states.changed()
    after.on_train_begin()
    CallbackStates([after]).restore(json.loads(json.dumps(state)), arrays)
    assert (after.patience, after.lowest, after.losses, after.sums.tolist()) == (
        7,
        0.5,
        [0.5],
        [0.5, 0.5],
    )


plain = (
    st.just([])
    | st.just({})
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
)
arrays_of = st.lists(st.floats(width=32), max_size=3).map(
    lambda values: np.array(values, np.float32)
)
# weights, too
numbers = st.integers(0, 9).map(np.int64) | st.floats(width=32, allow_nan=False).map(np.float32)
values = st.recursive(
    plain | numbers | arrays_of,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.integers(), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.hypothesis
@given(values)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    kept = AttributeValue.of(value, "callbacks/x")
    again = decoded(json.loads(json.dumps(kept.text)), kept.arrays)
    np.testing.assert_equal(again, value)
    assert type(again) is type(value)
    assert AttributeValue.of(again, "callbacks/x").text == kept.text
