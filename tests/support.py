"""Runs a few steps of a model in this process, on any number of replicas."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.trainer_loop import fresh_collectives
from trainer import job
from trainer.build import build_setup
from trainer.config.recipe import resolve
from trainer.config.train_config import TrainConfig
from trainer.distribution.step import StepContext
from trainer.distribution.strategy import make_replicas
from trainer.reporting.progress import StepLogs
from trainer.training.preemption import StopRequest
from trainer.training.steps import StepRunner


def run_steps(config: TrainConfig, steps: int) -> tuple[keras.Model, StepLogs]:
    """A fresh model after `steps` steps in one call, and what the call returned."""
    fresh_collectives()
    assembly = build_setup(config, make_replicas(config))
    return assembly.model, assembly.step_runner()(assembly.rows_from(0), 0, steps)


class Signals:
    """Signals that come when a test says so, to the run that is under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stop = StopRequest()
        monkeypatch.setattr(job, "stop_on_signals", self._listen)

    @contextmanager
    def _listen(self) -> Iterator[StopRequest]:
        self._stop = StopRequest()
        yield self._stop

    def come(self) -> None:
        """What SIGTERM does."""
        self._stop.signal = "SIGTERM"


def weights(model: keras.Model) -> dict[str, Any]:
    """Every weight tensor by its place in the model."""
    return {f"{i} {tuple(variable.shape)}": np.asarray(variable) for i, variable in enumerate(model.weights)}


def largest_difference(one: dict[str, Any], other: dict[str, Any], smallest_norm: float = 1e-30) -> float:
    """The largest L2 difference of any tensor, relative to its norm or, where that is smaller, to `smallest_norm`."""
    assert one.keys() == other.keys()
    norms = {name: max(float(np.linalg.norm(one[name])), smallest_norm) for name in one}
    return max(float(np.linalg.norm(one[name] - other[name])) / norms[name] for name in one)


def permute_rows(monkeypatch: pytest.MonkeyPatch, rows: int, seed: int) -> None:
    """From here on every global batch, and the noise drawn for it, has its rows in another order."""
    order = np.random.default_rng(seed).permutation(rows)
    draw, take = StepContext._draw, StepRunner._rows_of
    monkeypatch.setattr(StepContext, "_draw", lambda self, *given: tf.gather(draw(self, *given), order))

    def taken(self: StepRunner, batch: Any, replica: Any) -> Any:
        data = take(self, batch, replica)
        if isinstance(data, tuple):
            return tuple(tf.gather(part, order) for part in data)
        return tf.gather(data, order, axis=1)

    monkeypatch.setattr(StepRunner, "_rows_of", taken)


def small(*flags: str) -> TrainConfig:
    """Settings of a WGAN-GP that runs fifty steps in seconds."""
    base = ["--image_size=16", "--width=8", "--latent_dim=16", "--global_batch_size=16", "--critic_steps=2"]
    return resolve([*base, "--steps=50", *flags]).config


def real_data(name: str) -> Path:
    """A folder of the real data that TRAINER_TEST_DATA names; skips the test where it is not set."""
    root = os.environ.get("TRAINER_TEST_DATA")
    if not root:
        pytest.skip("TRAINER_TEST_DATA names no folder with mnist/, fashion-mnist/, grocery-store/, nasty-images/")
    return Path(root) / name
