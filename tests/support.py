"""Runs a few steps of a model in this process, on any number of replicas."""

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import Input, Model, Sequential, layers
from keras.models import load_model

from tests.models import compiled
from trainer.base.errors import DONE, UserError
from trainer.base.settings.request import Overrides, first_values
from trainer.base.settings.train_config import TrainConfig
from trainer.checks.on_gpus import runner_and_rows
from trainer.cluster.strategy import make_replicas
from trainer.reporting.progress import StepLogs
from trainer.run import job
from trainer.run.start import StartedJob
from trainer.run.training_run import TrainingRun
from trainer.run.training_setup import build_setup
from trainer.training.signals import StopRequest

SMALL = [
    "--data=digits",
    "--image_size=16",
    "--width=4",
    "--latent_dim=8",
    "--global_batch_size=8",
    "--critic_steps=2",
    "--steps=4",
]


@contextmanager
def refused(line: str) -> Iterator[None]:
    """Expects a UserError of one line that contains `line`."""
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        yield
    assert "\n" not in str(caught.value)


def run_steps(config: TrainConfig, steps: int, order: int | None = None) -> tuple[Model, StepLogs]:
    """Returns a fresh model after `steps` steps in one call, and what the call returned.

    order: the seed by which the rows of each batch, and what is drawn for them, are permuted.
    """
    setup = build_setup(config, make_replicas(config))
    runner, rows = runner_and_rows(setup, order)
    return setup.model, runner(rows, 0, steps)


def run_job(config: TrainConfig) -> Path:
    """Runs a whole job in this process; returns its job directory."""
    assert job.run(config, ["python", "-m", "trainer.task", "--x=a b"], time.monotonic()) == DONE
    return Path(config.job_dir)


def prepared(config: TrainConfig) -> TrainingRun:
    """Returns a job just before it trains."""
    return job.prepare_run(StartedJob.open(config, [], 0.0), make_replicas(config))


class Signals:
    """Sends signals to the current run when a test requests it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stop = StopRequest()
        monkeypatch.setattr(job, "stop_on_signals", self._listen)

    @contextmanager
    def _listen(self) -> Iterator[StopRequest]:
        self._stop = StopRequest()
        yield self._stop

    def come(self) -> None:
        """Does what SIGTERM does."""
        self._stop.signal = "SIGTERM"


def classifier_of(shape: tuple[int, ...], *parts: layers.Layer, optimizer: Any = "adam") -> Model:
    """Returns a compiled classifier: an input of this shape, these layers, and a dense one of ten
    logits."""
    return compiled(Sequential([Input(shape), *parts, layers.Dense(10)]), optimizer)


def resolved(*flags: str) -> TrainConfig:
    return Overrides.parse(flags).config


def read_lines(path: Path) -> list[Any]:
    """Returns the lines of a file of JSON lines."""
    return [*map(json.loads, path.read_text().splitlines())]


def saved_model(job_dir: Path) -> Model:
    return load_model(job_dir / "model" / "model.keras", compile=False)


def in_float64() -> None:
    """Lets this process make models in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def slow(*values: Any, id: str | None = None) -> Any:
    """Returns a parameter of a test that only `make test-all` runs."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def weights(model: Model) -> dict[str, Any]:
    """Returns every weight tensor by its position in the model."""
    return {
        f"{i} {tuple(variable.shape)}": np.asarray(variable)
        for i, variable in enumerate(model.weights)
    }


def largest_difference(one: Any, other: Any, smallest_norm: float = 1e-30) -> float:
    """Returns the largest L2 difference of any tensor of two models, or of two dictionaries,
    relative to its norm (at least `smallest_norm`)."""
    one, other = (each if isinstance(each, dict) else weights(each) for each in (one, other))
    assert one.keys() == other.keys()
    norms = {name: max(float(np.linalg.norm(one[name])), smallest_norm) for name in one}
    return max(float(np.linalg.norm(one[name] - other[name])) / norms[name] for name in one)


def small(*flags: str) -> TrainConfig:
    """Returns settings of a WGAN-GP, or the model that `flags` name, that runs fifty steps in
    seconds."""
    base = [
        "--data=digits",
        "--image_size=16",
        "--width=8",
        "--latent_dim=16",
        "--global_batch_size=16",
    ]
    return resolved(*of_model([*base, "--critic_steps=2", "--steps=50"], flags), *flags)


def tiny(*flags: str) -> TrainConfig:
    """Returns settings that train a model, which flags name, in a second."""
    return resolved(*of_model(SMALL, flags), *flags)


def of_model(flags: Sequence[str], others: Sequence[str]) -> list[str]:
    """Returns the flags without those that the model that `others` name does not have."""
    names = Overrides.read(first_values(others, ("recipe", "model", "data"))).functions.fields
    return [flag for flag in flags if flag[2:].partition("=")[0] in names]


def real_data(name: str) -> Path:
    """Returns a folder of the real data in TRAINER_TEST_DATA; skips the test if that is not set."""
    root = os.environ.get("TRAINER_TEST_DATA")
    if not root:
        pytest.skip(f"TRAINER_TEST_DATA names no folder with {name} (see CONTRIBUTING.md)")
    return Path(root) / name
