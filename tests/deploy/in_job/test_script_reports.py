"""Tests what is recorded of a script's reports: times by an injected clock, restarts, more reports
than are kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.in_job import script_reports
from deploy.in_job.script_reports import Record
from deploy.report.run_reader import RunRecord
from tests.fixtures import Patch
from trainer.base.run_files.job_files import read_stats


class Reporting:
    """Reports to a record at times of its own."""

    def __init__(self) -> None:
        self.time = 0.0
        self.record = Record(
            ".",
            {"config": {"script": "train.py"}, "cluster": {"workers": 1, "replicas": 1}},
            lambda: self.time,
        )
        self.record.begin()

    def at(self, seconds: float, **values: Any) -> None:
        self.record.take(json.dumps([seconds, values]).encode())

    def end(self, seconds: float, state: str = "done") -> None:
        self.time = seconds
        self.record.write(state)


def test_times_are_those_between_reports() -> None:
    """Steps 11 to 20 take 0.5 s each, 21 to 44 a quarter."""
    run = Reporting()
    run.at(7, step=10, loss=3.0)
    run.at(12, step=20, loss=2.0, accuracy=0.5)
    run.at(17, step=40, loss=1.0, accuracy=float("nan"))
    run.at(18, step=44, loss=1.0)
    run.end(20)
    read = RunRecord(Path())
    assert [line.step_seconds for line in read.reports] == [None, 0.5, 0.25, 0.25]
    assert [line.entry["images_per_second"] for line in read.reports] == [None, 2.0, 4.0, 4.0]
    assert read.startup_seconds == 7.0
    assert read.wall_seconds == 20.0
    assert read.steps == 44
    assert read.final == {"loss": 1.0}
    assert read.state == "done"
    assert read.info["data"] == {"unit": "steps", "examples_per_step": 1}
    assert read.problems == ()


def test_a_restart_goes_on_where_the_script_resumes() -> None:
    """Its steps after the checkpoint are repeated, and all of its time counts; a run that was done
    begins anew."""
    first = Reporting()
    for step in (10, 20, 30):
        first.at(step, step=step, loss=1.0)
    first.end(31, "interrupted")
    second = Reporting()
    second.at(2, step=20, loss=0.5)
    second.at(4, step=40, loss=0.2)
    second.end(5)
    read = RunRecord(Path())
    assert [(line.step, line.warm_up) for line in read.reports] == [
        (10, True),
        (20, True),
        (40, False),
    ]
    assert read.wall_seconds == 36.0
    assert read.restarts == 1
    assert read.startup_seconds == 10.0
    third = Reporting()
    third.at(1, step=1, loss=9.0)
    third.end(2)
    read = RunRecord(Path())
    assert len(read.reports) == 1
    assert read.wall_seconds == 2.0
    assert read.restarts == 0


def test_a_report_for_every_step_is_thinned_out(monkeypatch: Patch) -> None:
    """50 as they come, 8 a second, then 50 one a second apart, 50 three, then seven."""
    monkeypatch.setattr(script_reports, "LINES", 50)
    run = Reporting()
    for step in range(1, 2001):
        run.at(step / 8, step=step, loss=1.0)
    run.end(250)
    entries, problem = read_stats(Path())
    assert problem == ""
    assert RunRecord(Path()).steps == 2000
    assert len(entries) == 50 + 50 + 50 + (2000 - 50 - 50 * 8 - 50 * 24) // 56
    assert {round(entry["step_seconds"] or 0, 6) for entry in entries[1:]} == {0.125}
    assert {entry["images_per_second"] for entry in entries[1:]} == {8.0}


def test_odd_and_torn_reports_are_left_out() -> None:
    run = Reporting()
    for line in (
        '[1.0, {"step": 1',
        '[1.0, {"st[2.0, {"step": 1}]',
        "",
        '[2.0, {"step": 1' + "0" * 5000 + "}]",
    ):
        run.record.take(line.encode())
    run.at(1, step=-1, loss=1.0)
    run.at(1, step=10**16, loss=1.0)
    run.end(2, "failed")
    assert RunRecord(Path()).reports == ()
    for step in (1, 2):
        run.at(step, step=step, loss=float("inf"), val_loss=0.5)
    run.end(3)
    read = RunRecord(Path())
    assert read.final == {"val_loss": 0.5}
    assert len(read.reports) == 2


@pytest.mark.parametrize("damaged", ["{", "[]", '{"state": "running"}'])
def test_a_damaged_record_of_an_earlier_start_is_replaced(damaged: str) -> None:
    Path("result.json").write_text(damaged)
    run = Reporting()
    run.at(1, step=1, loss=9.0)
    run.end(2)
    assert RunRecord(Path()).state == "done"
    assert len(RunRecord(Path()).reports) == 1
