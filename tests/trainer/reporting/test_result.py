"""Tests the counts over restarts: repeated steps, seconds, failures, and restarts that cannot help."""

from pathlib import Path
from typing import Any

import pytest

from trainer.base.errors import FAULT, USER_MUST_CHANGE, UserError
from trainer.base.run_files.records import last_reported_step
from trainer.base.settings.train_config import TrainConfig
from trainer.reporting.progress import Progress
from trainer.reporting.result import RunResult, refuse_hopeless_restart

CONFIG = TrainConfig(job_dir="somewhere", steps=100)


def progress(step: int) -> Progress:
    return Progress(step, 100, steps_per_epoch=10, examples_per_step=8)


@pytest.mark.parametrize(
    ("state", "restarts"), [("running", 4), ("interrupted", 4), ("failed", 4), ("done", 3), ("budget", 3)]
)
def test_an_unplanned_end_is_counted_as_a_restart(state: str, restarts: int) -> None:
    assert RunResult.from_previous(CONFIG, {"state": state, "restarts": 3}, 0.0).restarts == restarts
    assert RunResult.from_previous(CONFIG, {}, 0.0).restarts == 0


def test_repeated_steps_are_counted_from_the_last_reported_one(tmp_path: Path) -> None:
    stats = tmp_path / "stats.jsonl"
    assert last_reported_step(tmp_path) == 0
    stats.write_text('{"kind": "report", "step": 40}\n{"kind": "report", "step": 57}\n{"kind": "rep')
    run_result = RunResult.from_previous(CONFIG, {"state": "running", "steps": 50, "steps_repeated": 2}, 0.0)
    run_result.resume(progress(50), last_reported_step(tmp_path))
    assert run_result.result("running")["steps_repeated"] == 2 + 7
    run_result.progress = progress(60)
    run_result.resume(progress(55), last_reported_step(tmp_path))  # rolled back within this process
    assert run_result.result("running")["steps_repeated"] == 2 + 7 + 5


def test_seconds_add_up_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1_030.0)
    run_result = RunResult.from_previous(CONFIG, {"wall_seconds": 70.5, "saving_seconds": 1.5}, 1_000.0)
    run_result.saving_seconds = 0.25
    result = run_result.result("done")
    assert (result["wall_seconds"], result["saving_seconds"]) == (100.5, 1.75)


def test_a_failure_keeps_the_known_values() -> None:
    """Covers values that this process wrote itself: the file did not exist when it began."""
    known: Any = {"state": "running", "steps": 50, "final": {"losses": {"loss": 1.0}}}
    failed = RunResult.from_previous(CONFIG, {}, 0.0).failure("no such folder", USER_MUST_CHANGE, known)
    assert (failed["state"], failed["error"], failed["exit_code"]) == ("failed", "no such folder", 2)
    assert (failed["steps"], failed["final"]) == (50, {"losses": {"loss": 1.0}})


def failed_before(**other: Any) -> Any:
    return {**RunResult.from_previous(CONFIG, {}, 0.0).failure("step 3: loss is NaN", USER_MUST_CHANGE, {}), **other}


def test_on_vertex_the_same_job_with_the_same_settings_fails_with_the_old_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "123")
    with pytest.raises(UserError, match=r"^step 3: loss is NaN$"):
        refuse_hopeless_restart(CONFIG, failed_before())
    refuse_hopeless_restart(CONFIG, {})
    refuse_hopeless_restart(CONFIG, failed_before(exit_code=FAULT))
    refuse_hopeless_restart(TrainConfig(job_dir="somewhere", steps=101), failed_before())
    before = failed_before()
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "124")  # a new job: the bucket may have been fixed
    refuse_hopeless_restart(CONFIG, before)


def test_locally_the_same_command_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOUD_ML_JOB_ID", raising=False)
    refuse_hopeless_restart(CONFIG, failed_before())
