"""Tests that the first failure of a run is kept."""

from pathlib import Path

from trainer.base.run_files.job_files import read_result, record_failure


def test_the_first_failure_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"steps": 5, "state": "running"}')
    for error in ("first", "second"):
        record_failure(tmp_path, error)
    assert read_result(tmp_path) == ({"steps": 5, "state": "failed", "error": "first"}, "")
