"""Tests damaged files of a job directory, a comparison and submissions: they cost values, and no
traceback."""

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.job import ledger as record
from deploy.report.collection import collect
from deploy.report.html_page import to_html, write_report
from deploy.report.measures import summarize
from deploy.report.run_reader import RunRecord
from deploy.report.table import notes, to_json, to_markdown, to_terminal
from deploy.report.verdict import verdict
from tests.deploy.planted import content as read
from tests.deploy.planted import edit, plant
from tests.fixtures import Json
from tests.fuzz import WORDS, at_most, examples, json_like, like, one_line
from tests.support import refused
from trainer.base.errors import DONE
from trainer.base.run_files.job_directory import JobDir, open_job_dir
from trainer.base.run_files.job_files import drop_stats_after
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import TrainConfig
from trainer.reporting.progress import Progress
from trainer.reporting.result import ResultWriter, refuse_hopeless_restart
from trainer.run import job
from trainer.training.checkpoint import (
    Damaged,
    _digest,
    _fingerprint,
    checkpoint_folders,
    read_checkpoint,
)


def config(folder: Path, *flags: str) -> TrainConfig:
    return Overrides.parse(
        [
            "--model=mlp",
            "--width=8",
            "--image_size=8",
            "--steps=2",
            "--report_every_steps=1",
            "--tensorboard=false",
            f"--job_dir={folder}",
            *flags,
        ]
    ).config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs two steps, and returns the job directory."""
    folder = tmp_path_factory.mktemp("run") / "job"
    assert job.run(config(folder), ["python"], 0.0) == DONE
    return folder


_NAMES = ("run.json", "result.json", "stats.jsonl")
_FOLDER = plant(f"{tempfile.mkdtemp()}/run", [0.1], fid=12.0)
RUN: Json = read(_FOLDER / "run.json")
RESULT: Json = read(_FOLDER / "result.json") | {
    "asked_steps": 30,
    "restarts": 1,
    "saving_seconds": 0.1,
    "steps_repeated": 2,
    "exit_code": 2,
    "vertex_job": "1",
    "settings": "x",
}
LINE: Json = read(_FOLDER / "stats.jsonl") | {"gpus": [{"memory_gib": 1.0}], "untimed_steps": 1}
COMPARISON: Json = {
    "tiers": [
        {
            "name": "a",
            "machine_type": "g2-standard-12",
            "accelerator_type": "NVIDIA_L4",
            "accelerators": 1,
            "workers": 1,
            "price_per_hour": 0.8,
        },
        {"name": "b", "machine_type": "n1-standard-8"},
    ],
    "scaling": "strong",
    "on": "local",
    "parallel": 1,
}
_lines = st.lists(json_like(LINE), max_size=5).map(b"\n".join)


@examples(15)
@given(about=json_like(RUN), result=json_like(RESULT), lines=_lines)
def test_a_run_that_resumes(
    about: bytes, result: bytes, lines: bytes, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "again"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    for name, content in zip(_NAMES, (about, result, lines), strict=True):
        (folder / name).write_bytes(content)

    def resume() -> None:
        job_dir: JobDir = open_job_dir(config(folder))
        run_result = ResultWriter.of_job(config(folder), job_dir, 0.0)
        refuse_hopeless_restart(config(folder), run_result.before)
        run_result.resume(Progress(5, 10, steps_per_epoch=5, examples_per_step=1))
        drop_stats_after(folder, 5)
        job_dir.append_stats({"step": 6})
        run_result.write_end("failed", "so", 2)

    with at_most(64):
        one_line(resume)


@pytest.mark.parametrize("name", _NAMES)
def test_a_folder_where_a_file_should_be(name: str, tmp_path: Path) -> None:
    (tmp_path / name / "x").mkdir(parents=True)
    with refused(f"{tmp_path / name}"):
        job.run(config(tmp_path), ["python"], 0.0)


def reseal(folder: Path, manifest: Any) -> None:
    """Writes a manifest with a correct checksum."""
    sealed = {**manifest, "sha256": _digest(manifest)} if isinstance(manifest, dict) else manifest
    (folder / "manifest.json").write_text(json.dumps(sealed))


def manifest_of(folder: Path) -> Json:
    manifest: Json = read(folder / "manifest.json")
    del manifest["sha256"]
    return manifest


def copied(run: Path, root: Path) -> tuple[Path, Json]:
    """Copies the run's checkpoint into `root`; returns its folder and its manifest."""
    folder = shutil.copytree(
        run / "checkpoints" / "step-00000002", root / "step-00000002", dirs_exist_ok=True
    )
    return folder, manifest_of(folder)


@examples(15)
@given(data=st.data())
def test_a_manifest_with_the_right_checksum(
    data: st.DataObject, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, whole = copied(run, tmp_path_factory.getbasetemp())
    reseal(folder, data.draw(like(whole)))
    try:
        manifest, values = read_checkpoint(folder)
    except Damaged:
        return
    assert manifest["step"] >= 0
    assert values


@pytest.mark.parametrize("name", [*WORDS, "/dev/zero", "../../../../../../dev/zero"])
def test_files_that_a_manifest_names(name: str, run: Path, tmp_path: Path) -> None:
    folder, manifest = copied(run, tmp_path)
    reseal(folder, {**manifest, "files": {**manifest["files"], name: {"bytes": 1, "sha256": "x"}}})
    with pytest.raises(Damaged):
        read_checkpoint(folder)


def test_damaged_variables(run: Path, tmp_path: Path) -> None:
    """Shows that a correct checksum does not prove that the files are valid."""
    folder, manifest = copied(run, tmp_path)
    for content in (b"", b"x" * 1000, (folder / "variables.index").read_bytes()[:-20]):
        (folder / "variables.index").write_bytes(content)
        files = {name: _fingerprint(folder / name) for name in manifest["files"]}
        reseal(folder, {**manifest, "files": files})
        with pytest.raises(Damaged):
            read_checkpoint(folder)


@examples(2)
@given(data=st.data())
def test_a_state_of_another_version(
    data: st.DataObject, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "state"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder)
    (whole,) = checkpoint_folders(folder / "checkpoints")
    manifest = manifest_of(whole)
    state = manifest.pop("state")
    without_callbacks = {name: part for name, part in state.items() if name != "callbacks"}
    reseal(whole, {**manifest, "state": without_callbacks})
    with refused("its state is of another version of this trainer (KeyError('callbacks'))"):
        job.run(config(folder, "--steps=3"), ["python"], 0.0)
    reseal(whole, {**manifest, "state": data.draw(like(state))})
    one_line(lambda: job.run(config(folder, "--steps=3"), ["python"], 0.0))


def write_all_forms(folder: Path) -> None:
    collection = collect([str(folder)])
    rows = summarize(collection)
    lines = verdict(collection, rows)
    more = [*notes(rows, collection)]
    assert all((to_markdown(rows, lines + more), to_json(rows, lines, more), to_terminal(rows)))
    assert "<script>alert" not in to_html(collection, rows, lines, more)


@examples(10)
@given(about=json_like(RUN), result=json_like(RESULT), lines=_lines, asked=json_like(COMPARISON))
def test_a_report(
    tmp_path_factory: pytest.TempPathFactory,
    about: bytes,
    result: bytes,
    lines: bytes,
    asked: bytes,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "report"
    shutil.rmtree(folder, ignore_errors=True)
    for run in ("a/repeat-1", "a/repeat-2", "b/repeat-1", "b/repeat-2"):
        plant(folder / run, [0.5, 0.1, 0.1])
    for name, content in zip(_NAMES, (about, result, lines), strict=True):
        (folder / "a" / "repeat-1" / name).write_bytes(content)
    (folder / "comparison.json").write_bytes(asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploy.report.plots.picture", lambda *plot, **look: b"")
        one_line(lambda: write_all_forms(folder))


def test_html_in_every_text(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>"
    plant(tmp_path / "a", [0.5, 0.1, 0.1], devices=(script,), error=script, state=script)
    about = {"command": script, "started": script, "versions": {"tensorflow": script}}
    config = {**RUN["config"], "model": script, "recipe": script, script: script}
    edit(tmp_path / "a" / "run.json", config=config, **about)
    plant(tmp_path / "b", [0.5, 0.1, 0.1])
    assert RunRecord(tmp_path / "a").state == script
    write_report([str(tmp_path)], str(tmp_path / "out"))
    assert "<script>alert" not in (tmp_path / "out" / "report.html").read_text()


RECORD = {
    "submission": "x",
    "attempts": [asdict(record.Attempt("a", "p", "r", 1.0, "gs://b/x", "FAILED", "projects/1/x"))],
}


@examples(40)
@given(content=json_like(RECORD))
def test_a_record_of_a_submission(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "records" / "here"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "one.json").write_bytes(content)

    def rewritten() -> None:
        found = record.find_attempt("x")
        if found:
            found[0].write()
            assert isinstance(found[1].job, str)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "SUBMISSIONS", folder)
        one_line(rewritten)
    assert [path.name for path in folder.parent.rglob("*")] == ["here", "one.json"]
