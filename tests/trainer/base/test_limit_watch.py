"""Tests, with a planted clock and planted GPUs, when a job ends itself, and how nvidia-smi is
read."""

import math
from pathlib import Path
from typing import Any

from tests.fixtures import Patch
from tests.planted_watch import PlantedWatch
from trainer.base.limit_watch import (
    CHECK_S,
    GRACE_S,
    LimitWatch,
    StopLimits,
    read_gpus,
    read_limits,
)

IDLE = StopLimits(idle_s=1800.0)


class Watched:
    """Holds a job with a watch, and what the watch does."""

    def __init__(self, monkeypatch: Patch, limits: StopLimits, ran_s: float = 0.0) -> None:
        self.planted = PlantedWatch(monkeypatch)
        self.done = list[str]()
        self.watch = LimitWatch(
            limits,
            self.done.append,
            lambda: self.done.append("end"),
            lambda: self.done.append("leave"),
            ran_s,
        )

    def spend(self, seconds: float, *percent: Any, until_told: bool = True) -> None:
        """Lets time pass with the GPUs used so much, by default only until the job is told to
        end."""
        self.planted.percent = percent
        until = self.planted.now + seconds
        while self.planted.now < until and not (until_told and self.watch.reason):
            self.planted.now += CHECK_S
            self.watch.check()


def test_a_stall_is_ended_at_the_limit_and_told_of_at_half(monkeypatch: Patch) -> None:
    job = Watched(monkeypatch, IDLE)
    job.spend(600, 95.0, 3.0)
    job.spend(7200, 4.0, 9.9)
    assert job.planted.now == 600 + 1800
    reason = "all GPUs were below 10 % for 30 minutes (--stop_if_idle)"
    told = [
        f"halfway to a limit at which this job ends itself: {reason}",
        f"stops: {reason}",
        "end",
    ]
    assert (job.watch.reason, job.done) == (reason, told)
    monkeypatch.setattr(job.watch, "saves", lambda: True)
    job.spend(10 * GRACE_S, until_told=False)
    assert job.done == told, "saving is no hang"
    monkeypatch.setattr(job.watch, "saves", lambda: False)
    job.spend(GRACE_S - CHECK_S, until_told=False)
    assert job.done == told
    job.spend(CHECK_S, until_told=False)
    assert job.done == [*told, "leave"], "it hangs"


def test_time_without_work_for_gpus_and_with_unknown_use_neither_counts_nor_ends_a_count(
    monkeypatch: Patch,
) -> None:
    job = Watched(monkeypatch, IDLE)
    job.spend(900, 0.0)
    job.spend(7200, 0.0, None)  # as under MIG
    job.spend(7200)
    monkeypatch.setattr(job.watch, "works", lambda: False)
    job.spend(7200, 60.0)
    monkeypatch.setattr(job.watch, "works", lambda: True)
    assert (job.watch.idle_s, job.watch.reason) == (900, "")
    assert job.done[1:] == [
        "nvidia-smi does not report the use of the GPUs: that time does not count as idle"
    ]
    job.spend(900, 0.0)
    assert job.watch.reason


def test_use_that_nvidia_smi_does_not_show_ends_a_count(monkeypatch: Patch) -> None:
    """As of a script, whose start is free however long it is."""
    job = Watched(monkeypatch, IDLE)
    job.watch.idle_s = -math.inf
    job.spend(36_000, 0.0)
    for _ in range(10):
        job.watch.active = True
        job.spend(1700, 0.0)
    assert not job.watch.reason
    job.spend(1800, 0.0)
    assert job.watch.reason


def test_a_job_that_takes_longer_than_its_plan_is_ended(monkeypatch: Patch) -> None:
    """The time before a restart counts, and no GPU is asked about."""
    limits = read_limits({"TRAINER_LIMITS": StopLimits(over_s=5400.0, factor=1.5).text})
    job = Watched(monkeypatch, limits, ran_s=1400.0)
    job.spend(9000, 0.0)
    assert (job.planted.now, job.watch.idle_s) == (4000, 0)
    assert (
        job.watch.reason
        == "the job has run for 1.5 hours, 1.5 times the upper end of its plan (--stop_if_over)"
    )
    assert read_limits({}).text == "", "of a job that was sent without limits"


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: Patch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool.write_text('#!/bin/sh\necho "2048, 87"\necho "1024, [N/A]"\necho some other line\n')
    assert read_gpus() == [], "it is no program"
    tool.chmod(0o755)
    assert read_gpus() == [
        {"memory_gib": 2.0, "utilization_percent": 87.0},
        {"memory_gib": 1.0, "utilization_percent": None},
    ]
    monkeypatch.setattr("trainer.base.limit_watch._LONGEST_QUERY_S", 0.01)
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    assert read_gpus() == [], "it hangs"
