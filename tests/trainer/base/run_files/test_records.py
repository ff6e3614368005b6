"""Tests that one module names the files of a run, and that the first failure is kept."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from deploy.in_job import run_record
from tests.docs.sources import ROOT
from trainer.base.run_files import run_layout
from trainer.base.run_files.records import read_result, record_failure

FILES = {*run_layout.RUN_FILES, run_layout.SKIPPED_IMAGES}
OTHER_USES = {"model/"}  # a prefix of variables' names
FOLDERS = {run_layout.CHECKPOINTS, run_layout.LOGS, run_layout.MODEL, run_layout.SAMPLES}


def named(source: str) -> Iterator[str]:
    """Yields the strings of `source` that name a run's file or folder; docstrings and prose do not count."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            yield from FOLDERS & {node.right.value}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            parts = set(re.split(r"[/(){}?:]", node.value))
            if parts & FILES or ("/" in node.value and parts & FOLDERS) or run_layout.STEP_PREFIX in node.value:
                yield node.value


def test_no_other_module_names_the_files_of_a_run() -> None:
    modules = {path for folder in ("trainer", "deploy") for path in (ROOT / folder).rglob("*.py")}
    modules.remove(Path(run_layout.__file__))
    modules.remove(Path(run_record.__file__))  # beside a script, without any other module of this package
    assert {run_record.RUN_INFO, run_record.STATS, run_record.RESULT} <= FILES
    found = {str(path.relative_to(ROOT)): list(named(path.read_text(encoding="utf-8"))) for path in modules}
    assert {path: names for path, names in found.items() if set(names) - OTHER_USES} == {}


def test_a_name_is_found() -> None:
    for source in ('path / "model"', 'path / "run.json"', 'f"{path}/logs/"', 'path.glob("step-*")', '"samples/x.png"'):
        assert len(list(named(source))) == 1
    assert list(named('f(model="model", text="run.json is damaged")')) == []


def test_the_first_failure_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"steps": 5, "state": "running"}')
    for error in ("first", "second"):
        record_failure(tmp_path, error)
    assert read_result(tmp_path) == ({"steps": 5, "state": "failed", "error": "first"}, "")
