"""Callbacks of users see in this loop what they see in `fit` on one device, on one replica and on
two."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from keras import Model
from numpy.testing import assert_allclose

from tests import user_callbacks
from tests.drill import read
from tests.fixtures import Log, Patch, parametrize
from tests.support import resolved, run_job, slow
from tests.user_callbacks import BATCH, EPOCHS, SEEN
from trainer.base.log import log
from trainer.training.callbacks import acts_on_batches, load_callbacks, most_steps_of_a_call


def trained(tmp_path: Path, callbacks: str, replicas: int) -> dict[str, list[Any]]:
    """Returns what the callbacks saw in a run on so many replicas; 0: in `fit`."""
    SEEN.clear()
    user_callbacks.FOLDER = tmp_path / f"{callbacks}-{replicas}"
    user_callbacks.FOLDER.mkdir()
    if replicas:
        run_job(
            resolved(
                "--model=tests.user_callbacks:build",
                "--data=tests.user_callbacks:data",
                f"--epochs={EPOCHS}",
                f"--callbacks=tests.user_callbacks:{callbacks}",
                f"--global_batch_size={BATCH}",
                "--precision=float64",
                f"--replicas={replicas}",
                f"--job_dir={user_callbacks.FOLDER / 'run'}",
                "--tensorboard=false",
            )
        )
        history = read(user_callbacks.FOLDER / "run" / "result.json")["history"]
    else:
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        model = user_callbacks.build()
        held_back = user_callbacks.rows(4)
        history = model.fit(
            *user_callbacks.rows(),
            BATCH,
            EPOCHS,
            0,
            getattr(user_callbacks, callbacks)(),
            validation_data=held_back,
        ).history
    history.pop("level")  # `fit` gives what evaluation left in its variable
    return {name: list(values) for name, values in (SEEN | history).items()}


@parametrize("callbacks", ["by_epoch", *map(slow, ("all_kinds", "stop_by_batch"))])
def test_callbacks_see_what_they_see_in_fit(tmp_path: Path, callbacks: str) -> None:
    in_fit, *runs = (trained(tmp_path, callbacks, replicas) for replicas in (0, 1, 2))
    for replicas, seen in enumerate(runs, 1):
        assert seen.keys() == in_fit.keys()
        for name, values in in_fit.items():
            assert_allclose(seen[name], values, rtol=1e-6, err_msg=f"{name} on {replicas} replicas")


def test_every_hook_that_fit_calls_is_called_here_or_named_in_a_line(
    small_config: Callable[..., Any], caplog: Log
) -> None:
    """A Keras with another hook fails here: call it, or say that it is not called."""
    sources = [
        inspect.getsource(inspect.unwrap(function)) for function in (Model.fit, Model.evaluate)
    ]
    hooks = set(re.findall(r"callbacks\.(on_\w+)\(", "".join(sources)))
    called = {
        f"on_{of}_{at}"
        for of in ("train", "epoch", "train_batch", "test")
        for at in ("begin", "end")
    }
    assert hooks == called | {"on_test_batch_begin", "on_test_batch_end"}
    assert {name for name in vars(keras.utils.PyDataset) if name.startswith("on_")} == {
        "on_epoch_begin",
        "on_epoch_end",
    }
    load_callbacks(small_config("--callbacks=tests.user_callbacks:of_test_batches"))
    assert (
        "callbacks: OfTestBatches: on_test_batch_begin and on_test_batch_end are not called"
        in caplog.text
    )


def test_a_call_is_one_step_only_for_callbacks_of_single_batches(monkeypatch: Patch) -> None:
    lines = []
    monkeypatch.setattr(log, "info", lines.append)
    kept = [keras.callbacks.TensorBoard, keras.callbacks.OrbaxCheckpoint]
    assert not any(
        map(acts_on_batches, [*user_callbacks.by_epoch(), *(kind.__new__(kind) for kind in kept)])
    )
    assert most_steps_of_a_call(user_callbacks.by_epoch(), 0) == 0
    assert most_steps_of_a_call(user_callbacks.all_kinds(), 10) == 1
    (line,) = lines
    assert line.startswith(
        "callbacks: FloatOfAll, LambdaCallback, ModelCheckpoint, OldNames, OneCycle, WarmUp,"
        " WeightLog: "
    )


@parametrize(
    "make",
    [
        lambda: keras.callbacks.ModelCheckpoint("x.keras", save_freq=5),
        lambda: keras.callbacks.TensorBoard(update_freq="batch"),
        lambda: type(
            "Stop",
            (keras.callbacks.TerminateOnNaN,),
            {"on_batch_end": lambda self, batch, logs=None: None},
        )(),
    ],
)
def test_settings_and_subclasses_can_make_a_callback_one_of_batches(
    make: Callable[[], Any],
) -> None:
    assert acts_on_batches(make())
