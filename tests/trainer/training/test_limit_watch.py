"""Tests, with a planted clock and planted GPUs, when a job ends itself and when it does not."""

import os
from pathlib import Path
from typing import Any

import pytest

from trainer.base.run_files.goodput import EVENTS, OTHER, SAVE, START, STEP, Goodput
from trainer.base.run_files.stop_limits import StopLimits, read_limits
from trainer.training.limit_watch import GRACE_SECONDS, POLL_SECONDS, LimitWatch
from trainer.training.preemption import StopRequest

IDLE = StopLimits(idle_s=1800.0)


class Planted:
    """Holds a guard with a clock of its own, and what it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limits: StopLimits, peers: Any = None) -> None:
        self.now, self.percent, self.left, self.slow = 0.0, [90.0], list[str](), list[int]()
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.goodput, self.request = Goodput(0.0, {}), StopRequest()
        self.guard = LimitWatch(
            limits, self, self.goodput, peers, self.request, lambda: self.now, self.left.append,  # type: ignore[arg-type]
            lambda index, seconds: self.slow.append(index),
        )  # fmt: skip

    def read(self) -> list[dict[str, float | None]]:
        return [{"memory_gib": 1.0, "utilization_percent": used} for used in self.percent]

    def spend(self, seconds: float, phase: str, *percent: Any) -> None:
        """Lets the run be in a phase, with its GPUs used so much, until the guard ends it."""
        self.goodput.enter(phase)
        self.percent = list(percent)
        until = self.now + seconds
        while self.now < until and not self.request.reason:
            self.now += POLL_SECONDS
            self.guard.look()


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Planted:
    return Planted(monkeypatch, IDLE)


def test_a_stall_is_ended_at_the_limit_and_told_of_at_half(planted: Planted, caplog: pytest.LogCaptureFixture) -> None:
    planted.spend(3600, START, 0.0, 0.0)
    planted.spend(600, STEP, 95.0, 3.0)
    began = planted.now
    planted.spend(7200, STEP, 4.0, 9.9)
    assert 0 <= planted.now - began - 1800 <= 60
    assert planted.request.reason == "all GPUs were below 10 % for 30 minutes (--stop_if_idle)"
    assert [line for line in caplog.messages if line.startswith("half of the time")] == [
        f"half of the time is over until this job ends itself: {planted.request.reason}"
    ]
    assert not planted.left
    planted.now += GRACE_SECONDS + 1
    planted.guard.look()
    assert planted.left == [planted.request.reason], "the loop hangs: nobody has stopped it"


def test_phases_that_need_no_gpu_and_unknown_use_are_no_stall(planted: Planted) -> None:
    """Evaluation and saving neither count nor begin the time anew; nvidia-smi does not know the use under MIG."""
    for _ in range(10):
        planted.spend(900, STEP, 0.0)
        planted.spend(3600, EVENTS, 0.0)
        planted.spend(3600, SAVE, 0.0)
        planted.spend(POLL_SECONDS, STEP, 50.0)
    planted.spend(7200, STEP, None)
    planted.spend(7200, STEP)
    assert not planted.request.reason
    for _ in range(3):
        planted.spend(890, STEP, 0.0)
        planted.spend(3600, EVENTS, 60.0)
    assert planted.request.reason


class Peers:
    """Stands for the connections to another worker, whose GPUs have been idle for `other` seconds."""

    is_chief, stop_reason = True, ""

    def __init__(self) -> None:
        self.other, self.stopped = 0.0, ""

    def share_idle(self, seconds: float) -> list[float]:
        return [seconds, self.other]

    def stop(self, reason: str) -> None:
        self.stopped = reason


def test_one_idle_worker_of_two_is_named_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers()
    planted = Planted(monkeypatch, IDLE, peers)
    planted.spend(3600, STEP, 0.0)
    assert (planted.request.reason, set(planted.slow)) == ("", {0})
    peers.other = 1800.0
    planted.spend(60, OTHER, 0.0)
    assert planted.request.reason == peers.stopped != ""
    follower = Peers()
    follower.is_chief = False
    follower.stop_reason = "the chief says so"
    worker = Planted(monkeypatch, IDLE, follower)
    worker.spend(10, STEP, 90.0)
    assert worker.request.reason == "the chief says so"


def test_a_job_that_takes_longer_than_its_plan_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = read_limits({"TRAINER_LIMITS": StopLimits(over_s=5400.0, factor=1.5).text})
    planted = Planted(monkeypatch, limits)
    planted.spend(9000, STEP, 90.0)
    assert planted.now == 5400
    reason = "the job has run for 1.5 hours, 1.5 times the upper end of its plan (--stop_if_over)"
    assert planted.request.reason == reason
    assert read_limits({}).text == "", "of a job that was sent without limits"


def test_seconds_are_in_one_class_over_restarts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process is killed 7 s after its last result.json; the job goes on 20 s later, or another job does."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("time.time", lambda: 1000.0 + now)
    monkeypatch.delenv("CLOUD_ML_JOB_ID", raising=False)
    first = Goodput(100.0, {})
    for seconds, phase in ((30.0, STEP), (50.0, SAVE), (2.0, STEP)):
        now += seconds
        first.enter(phase)
    first.move(1.5, SAVE, OTHER)
    before: dict[str, Any] = {
        "state": "running",
        "goodput": first.seconds(),
        "wall_seconds": 82.0,
        "written_at": 1000.0 + now,
    }
    assert before["goodput"] == {**dict.fromkeys(before["goodput"], 0.0), START: 30, STEP: 50, SAVE: 0.5, OTHER: 1.5}
    (tmp_path / ".alive").touch()
    os.utime(tmp_path / ".alive", (1000.0 + now + 7,) * 2)
    now += 27
    for paid, restarts, unpaid in ((True, 20.0, 0.0), (False, 0.0, 20.0)):
        again = Goodput(now, before)
        again.recover(before, tmp_path, paid=paid)
        found = again.seconds()
        assert (found["wasted_progress_from_disruption"], again.unpaid_seconds) == (7.0, unpaid)
        assert found["infrastructure_recovery_from_disruption"] == restarts
        assert sum(found.values()) == 82 + 7 + restarts
    (tmp_path / ".alive").write_text(f"{1000.0 + now - 60} none")  # killed before it wrote a result.json
    os.utime(tmp_path / ".alive", (1000.0 + now - 10,) * 2)
    first = Goodput(now, {})
    first.recover({}, tmp_path, paid=False)
    assert (sum(first.seconds().values()), first.unpaid_seconds) == (50, 10)
    older = Goodput(now, {"wall_seconds": 12.0})
    assert older.seconds()["other"] == 12.0, "of a version that counted no classes"
