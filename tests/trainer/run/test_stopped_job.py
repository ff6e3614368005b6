"""Tests real trainings that end themselves at a limit: what they leave, and that the same command goes on."""

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.drill import last_state, lines, losses, numbers, read
from tests.fixtures import Make, Patch
from tests.nvidia_smi import PlantedGpu
from tests.support import Signals
from tests.support import run_job as run
from trainer.base.run_files.stop_limits import LIMITS, StopLimits
from trainer.base.run_files.tracking.tracked_files import RunFiles
from trainer.run import job
from trainer.training import limit_watch

FLAGS = ("--model=mlp", "--dropout=0.3", "--steps=40", "--steps_per_loop=1", "--report_every_steps=5",
         "--evaluation_fraction=0.2", f"--callbacks={__name__}:callbacks")  # fmt: skip
STALL = 23  # the step after which the first start waits
LIMIT_SECONDS = 30.0


class Stalling(keras.callbacks.Callback):
    """Waits after a step until a guard ends the run."""

    request: Any = None  # of the run that is to wait

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.request and int(self.model.optimizer.iterations) == STALL:
            until = time.monotonic() + LIMIT_SECONDS
            while not self.request().reason and time.monotonic() < until:
                time.sleep(0.01)


def callbacks() -> list[keras.callbacks.Callback]:
    return [Stalling()]


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: Patch) -> PlantedGpu:
    """Returns a GPU that the job believes to train on, and lets its guard look often."""
    monkeypatch.setattr(job, "local_devices", lambda config, cluster: ("GPU:0",))
    monkeypatch.setattr(limit_watch, "POLL_SECONDS", 0.05)
    monkeypatch.setattr("trainer.reporting.resources._QUERY_EVERY_SECONDS", 0.05)
    return PlantedGpu(tmp_path / "bin", monkeypatch, 3)


def test_a_job_ends_itself_and_the_same_command_goes_on(
    gpu: PlantedGpu, small_config: Make, tmp_path: Path, monkeypatch: Patch
) -> None:
    """It exits with 0, has its state, no model, and ends with the numbers of a run that was never stopped."""
    config, signals = small_config(*FLAGS), Signals(monkeypatch)
    monkeypatch.setattr(Stalling, "request", lambda self: signals._stop)
    over, idle = StopLimits(over_s=0.05, factor=1.5), StopLimits(idle_s=0.5)
    for limits, reason, steps in ((over, over.over, 1), (idle, idle.idle, STALL + 1)):
        monkeypatch.setenv(LIMITS, limits.text)
        folder = run(config)
        result = read(folder / "result.json")
        assert (result["state"], result["error"], result["steps"]) == ("stopped", reason, steps)
        assert sum(result["goodput"].values()) == pytest.approx(result["wall_seconds"], abs=0.01)
        assert not (folder / "model").exists()
        assert RunFiles(folder, "x").run(ended=True).state == "killed"  # as trackers show it

    gpu.use(95)
    monkeypatch.setattr(Stalling, "request", None)
    monkeypatch.setenv(LIMITS, StopLimits(idle_s=0.5, over_s=1e5, factor=1.5).text)
    run(config)
    result = read(folder / "result.json")
    assert (result["state"], result["error"], result["restarts"], result["steps_repeated"]) == ("done", None, 0, 0)
    undisturbed = run(small_config(*FLAGS, f"--job_dir={tmp_path / 'undisturbed'}"))
    assert numbers(folder) == numbers(undisturbed)
    assert losses(folder) == losses(undisturbed)
    assert len(lines(folder, "evaluation")) == len(lines(undisturbed, "evaluation")) >= 1
    ours, theirs = last_state(folder), last_state(undisturbed)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
