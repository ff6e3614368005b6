"""Tests that the first failure of a run is kept, and that both ways to write when it began are read."""

from pathlib import Path

import pytest

from trainer.base.run_files.records import append_stats, read_result, record_failure, write_json
from trainer.base.run_files.tracking.sender import RunFiles


def test_the_first_failure_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"steps": 5, "state": "running"}')
    for error in ("first", "second"):
        record_failure(tmp_path, error)
    assert read_result(tmp_path) == ({"steps": 5, "state": "failed", "error": "first"}, "")


@pytest.mark.parametrize("started", ["2026-11-01T00:00:00Z", "2026-11-01T01:00:00+01:00"])
def test_a_script_may_write_when_it_began_in_another_form(started: str, tmp_path: Path) -> None:
    """The trainer writes the first, the record of a script the second, in UTC."""
    write_json(tmp_path / "run.json", {"started": started})
    append_stats(tmp_path, {"kind": "report", "step": 1, "seconds": 2.0, "losses": {"loss": 1.0}})
    (point,) = RunFiles(tmp_path, "x").points(ended=True)
    assert point.time == 1793491200.0
