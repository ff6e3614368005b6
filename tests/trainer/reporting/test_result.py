"""Tests the counts over restarts: repeated steps, seconds, failures, and restarts that cannot
help."""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import Patch, parametrize
from trainer.base.errors import FAULT, USER_MUST_CHANGE, UserError
from trainer.base.run_files.goodput import OTHER, SAVE, START, STEP, Goodput
from trainer.base.run_files.job_directory import JobDir
from trainer.base.run_files.job_files import last_reported_step, read_result
from trainer.base.settings.train_config import TrainConfig
from trainer.reporting.progress import Progress, WorkerWaits
from trainer.reporting.result import ResultWriter, refuse_hopeless_restart

CONFIG = TrainConfig(job_dir="somewhere", steps=100)


def begun(folder: Path, before: Any = None, began: float = 0.0) -> ResultWriter:
    """Returns the counts of a process that begins in a job directory with that result.json."""
    job_dir = JobDir(folder, folder / "checkpoints", folder / "logs", folder / "model")
    if before is not None:
        job_dir.write("result.json", before)
    return ResultWriter.of_job(CONFIG, job_dir, began)


def written(run_result: ResultWriter, folder: Path, state: str = "running") -> Any:
    run_result.write(state, {})
    return read_result(folder)[0]


@parametrize(
    "state, restarts",
    [("running", 4), ("interrupted", 4), ("failed", 4), ("done", 3), ("budget", 3)],
)
def test_an_unplanned_end_is_counted_as_a_restart(
    state: str, restarts: int, tmp_path: Path
) -> None:
    assert begun(tmp_path).restarts == 0
    assert begun(tmp_path, {"state": state, "restarts": 3}).restarts == restarts
    refused = {"state": state, "restarts": 3, "exit_code": USER_MUST_CHANGE}
    assert begun(tmp_path, refused).restarts == 3


def test_repeated_steps_are_counted_from_the_last_reported_one(tmp_path: Path) -> None:
    stats = tmp_path / "stats.jsonl"
    assert last_reported_step(tmp_path) == 0
    stats.write_text(
        '{"kind": "report", "step": 40}\n{"kind": "report", "step": 57}\n{"kind": "rep'
    )
    run_result = begun(tmp_path, {"state": "running", "steps": 50, "steps_repeated": 2})
    run_result.resume(Progress(50, 100, steps_per_epoch=10, examples_per_step=8))
    assert written(run_result, tmp_path)["steps_repeated"] == 2 + 7


def test_seconds_add_up_over_processes(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1_030.0)
    run_result = begun(tmp_path, {"wall_seconds": 70.5, "saving_seconds": 1.5}, 1_000.0)
    run_result.saving_seconds = 0.25
    result = written(run_result, tmp_path, "done")
    assert (result["wall_seconds"], result["saving_seconds"]) == (100.5, 1.75)
    run_result.write_end("failed", "after the end", USER_MUST_CHANGE)
    assert read_result(tmp_path)[0] == result  # that of a finished run is left alone


def test_on_vertex_the_same_job_with_the_same_settings_fails_with_the_old_error(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """The failure keeps the values that this process wrote itself: the file did not exist when it
    began."""
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "123")
    run_result = begun(tmp_path)
    run_result.write("running", {"final": {"losses": {"loss": 1.0}}})
    run_result.write_end("failed", "step 3: loss is NaN", USER_MUST_CHANGE)
    failed = read_result(tmp_path)[0]
    assert (failed["state"], failed["error"], failed["exit_code"]) == (
        "failed",
        "step 3: loss is NaN",
        2,
    )
    assert failed["final"] == {"losses": {"loss": 1.0}}
    with pytest.raises(UserError, match=r"^step 3: loss is NaN$"):
        refuse_hopeless_restart(CONFIG, failed)
    refuse_hopeless_restart(CONFIG, {})
    refuse_hopeless_restart(CONFIG, failed | {"exit_code": FAULT})
    refuse_hopeless_restart(TrainConfig(job_dir="somewhere", steps=101), failed)
    for job in ("124", ""):  # a new job: the bucket may have been fixed; or none
        monkeypatch.setenv("CLOUD_ML_JOB_ID", job)
        refuse_hopeless_restart(CONFIG, failed)


def test_a_slow_worker_is_named_once(tmp_path: Path) -> None:
    """The second of three workers waits 40 % of the time for its batches, and the others for it."""
    waits = WorkerWaits()
    run_result = begun(tmp_path)
    verdicts = [waits.count((0.1, 2.1, 0.1), 5.0) for _ in range(8)]
    assert verdicts[:5] == [None] * 5  # less than 30 seconds of steps
    assert [(verdict[0], round(verdict[1], 6)) for verdict in verdicts[5:] if verdict] == [
        (1, 0.4)
    ] * 3
    for why in ("the others wait", "its GPUs alone are idle"):
        run_result.name_slow("worker 1", why)
    assert written(run_result, tmp_path)["slow_worker"] == {
        "name": "worker 1",
        "why": "the others wait",
    }
    assert WorkerWaits().count((9.0,), 99.0) is None  # one worker has nobody who waits for it


def test_seconds_are_in_one_class_over_restarts(monkeypatch: Patch) -> None:
    """A process is killed after its last result.json; 27 s later the job goes on, or another job
    does."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("time.time", lambda: 1000.0 + now)
    monkeypatch.delenv("CLOUD_ML_JOB_ID", raising=False)
    first = Goodput(100.0, {})
    for seconds, phase in ((30.0, STEP), (50.0, SAVE), (2.0, STEP)):
        now += seconds
        first.enter(phase)
    first.move(1.5, SAVE, OTHER)
    counted = first.seconds()
    assert counted == {**dict.fromkeys(counted, 0.0), START: 30, STEP: 50, SAVE: 0.5, OTHER: 1.5}
    before = {
        "state": "running",
        "goodput": counted,
        "wall_seconds": 82.0,
        "written_at": 1000.0 + now,
    }
    now += 27
    cases = ((before, True, 27.0, 0.0), (before, False, 0.0, 27.0), ({}, False, 0.0, 0.0))
    for stored, paid, restarts, unpaid in cases:
        again = Goodput(now, stored)
        again.recover(stored, paid=paid)
        assert again.seconds()["infrastructure_recovery_from_disruption"] == restarts
        assert again.unpaid_seconds == unpaid
        assert sum(again.seconds().values()) == stored.get("wall_seconds", 0) + restarts
    assert Goodput(now, {"wall_seconds": 12.0}).seconds()["other"] == 12.0, (
        "of a version that counted no classes"
    )
