"""Tests jobs that end themselves at a limit, by a planted clock: who decides, what they leave, how
they go on."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
from keras.callbacks import Callback

from tests.drill import lines, read
from tests.e2e.test_interruption import check_same
from tests.fixtures import SLOW, Make, Patch
from tests.planted_watch import PlantedWatch
from tests.support import Signals
from tests.support import run_job as run
from tests.workers import until
from trainer.base import limit_watch
from trainer.base.limit_watch import CHECK_S, LIMITS, StopLimits
from trainer.base.run_files.goodput import EVENTS, OTHER, SAVE, START, STEP, Goodput
from trainer.base.run_files.tracking.sender import RunFiles
from trainer.run.job_watch import JobWatch
from trainer.training.signals import StopRequest

FLAGS = (
    "--model=mlp",
    "--dropout=0.3",
    "--steps=40",
    "--steps_per_loop=1",
    "--report_every_steps=5",
    "--evaluation_fraction=0.2",
    f"--callbacks={__name__}:callbacks",
)
IDLE = StopLimits(idle_s=1800.0)
WHY_IDLE = "all GPUs were below 10 % for 30 minutes (--stop_if_idle)"
WHY_OVER = "the job has run for 0.5 hours, 1.5 times the upper end of its plan (--stop_if_over)"


class Stalling:
    """Lets an hour of the planted clock pass at a step, and waits there until the watch has decided
    to end the run."""

    planted: Any = None  # of the run
    step: int | None = None  # None: it lets an hour pass at each step, and waits nowhere
    signals: Any = None

    @classmethod
    def pass_hour(cls, step: int) -> None:
        if cls.planted and cls.step in (None, step):
            cls.planted.now += 3600.0
            until(lambda: cls.step is None or cls.signals._stop.reason)


def callbacks() -> list[Callback]:
    at_step: Any = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: Stalling.pass_hour(0),
        on_train_batch_end=lambda batch, logs: Stalling.pass_hour(
            int(at_step.model.optimizer.iterations)
        ),
    )
    return [at_step]


@SLOW
def test_a_job_ends_itself_and_the_same_command_goes_on(
    small_config: Make, tmp_path: Path, monkeypatch: Patch
) -> None:
    """It exits with 0, has its state, no model, and ends with the numbers of a run that was never
    stopped."""
    config = small_config(*FLAGS)
    planted = PlantedWatch(monkeypatch, 3.0)
    monkeypatch.setattr(limit_watch, "CHECK_S", 0.01)
    monkeypatch.setattr(Stalling, "planted", planted)
    monkeypatch.setattr(Stalling, "signals", Signals(monkeypatch))
    over = StopLimits(over_s=1800.0, factor=1.5)
    for limits, reason, stall, steps in ((over, WHY_OVER, 0, 1), (IDLE, WHY_IDLE, 23, 24)):
        monkeypatch.setattr(Stalling, "step", stall)
        monkeypatch.setenv(LIMITS, limits.text)
        folder = run(config)
        result = read(folder / "result.json")
        assert (result["state"], result["error"], result["steps"]) == ("stopped", reason, steps)
        assert sum(result["goodput"].values()) == pytest.approx(result["wall_seconds"], abs=0.01)
        assert not (folder / "model").exists()
        assert RunFiles(folder, "x").run(ended=True).state == "killed"  # as trackers show it

    planted.percent = (95.0,)
    monkeypatch.setattr(Stalling, "step", None)
    monkeypatch.setenv(LIMITS, StopLimits(idle_s=1800.0, over_s=1e6, factor=1.5).text)
    run(config)
    result = read(folder / "result.json")
    assert (result["state"], result["error"], result["restarts"], result["steps_repeated"]) == (
        "done",
        None,
        0,
        0,
    )
    undisturbed = run(small_config(*FLAGS, f"--job_dir={tmp_path / 'undisturbed'}"))
    assert lines(folder, "evaluation")
    check_same(folder, undisturbed)


class Worker:
    """Holds a worker's watch, and the worker that it names as slow."""

    def __init__(self, monkeypatch: Patch, peers: Any = None, *, is_chief: bool = True) -> None:
        monkeypatch.setenv(LIMITS, IDLE.text)
        self.planted = PlantedWatch(monkeypatch)
        self.request = StopRequest()
        self.slow = set[str]()
        self._goodput = Goodput(0.0, {})
        result = SimpleNamespace(
            goodput=self._goodput,
            job_began_at=time.time(),
            name_slow=lambda name, why: self.slow.add(name),
        )
        cluster = SimpleNamespace(is_chief=is_chief, name=lambda index: f"worker {index}")
        job: Any = SimpleNamespace(peers=peers, result=result, cluster=cluster)
        self._watch = JobWatch(job, self.request)

    def spend(self, seconds: float, phase: str, *percent: Any) -> None:
        """Lets the run be in a phase, with its GPUs used so much, until it is told to end."""
        self._goodput.enter(phase)
        self.planted.percent = percent
        until = self.planted.now + seconds
        while self.planted.now < until and not self.request.reason:
            self.planted.now += CHECK_S
            self._watch.check()


def test_phases_that_need_no_gpu_are_no_stall(monkeypatch: Patch) -> None:
    """They neither count nor begin the time anew."""
    worker = Worker(monkeypatch)
    worker.spend(7200, START, 0.0)
    for _ in range(10):
        worker.spend(900, STEP, 0.0)
        worker.spend(3600, EVENTS, 0.0)
        worker.spend(3600, SAVE, 0.0)
        worker.spend(CHECK_S, STEP, 50.0)
    assert not worker.request.reason
    for _ in range(3):
        worker.spend(890, STEP, 0.0)
        worker.spend(3600, EVENTS, 60.0)
    assert worker.request.reason == WHY_IDLE


class Peers:
    """Stands for the connections to another worker, whose GPUs have been idle for `other`
    seconds."""

    stop_reason = ""
    other = 0.0
    stopped = ""

    def share_idle(self, seconds: float) -> list[float]:
        return [seconds, self.other]

    def stop(self, reason: str) -> None:
        self.stopped = reason


def test_one_idle_worker_of_two_is_named_and_stops_nothing(monkeypatch: Patch) -> None:
    peers = Peers()
    worker = Worker(monkeypatch, peers)
    worker.spend(3600, STEP, 0.0)
    assert (worker.request.reason, worker.slow) == ("", {"worker 0"})
    peers.other = 1800.0
    worker.spend(60, OTHER, 0.0)
    assert worker.request.reason == peers.stopped == WHY_IDLE
    peers = Peers()
    worker = Worker(monkeypatch, peers, is_chief=False)
    worker.spend(7200, STEP, 0.0)
    assert not worker.request.reason
    peers.stop_reason = "the chief says so"
    worker.spend(CHECK_S, STEP, 90.0)
    assert worker.request.reason == "the chief says so"
