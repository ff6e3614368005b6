"""Tests that one module names the files of a run, and that the first failure is kept."""

from pathlib import Path

from trainer.base.run_files import run_layout
from trainer.base.run_files.records import read_result, record_failure

FILES = {*run_layout.RUN_FILES, run_layout.SKIPPED_IMAGES}
OTHER_USES = {"model/"}  # a prefix of variables' names
FOLDERS = {run_layout.CHECKPOINTS, run_layout.LOGS, run_layout.MODEL, run_layout.SAMPLES}


def test_the_first_failure_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"steps": 5, "state": "running"}')
    for error in ("first", "second"):
        record_failure(tmp_path, error)
    assert read_result(tmp_path) == ({"steps": 5, "state": "failed", "error": "first"}, "")
