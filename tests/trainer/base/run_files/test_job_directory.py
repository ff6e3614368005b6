"""Tests where a run writes its files, and that no file is ever half written."""

import os
import subprocess
import sys
from pathlib import Path

from tests.fixtures import Patch, parametrize
from tests.support import refused
from trainer.base.run_files.job_directory import open_job_dir
from trainer.base.run_files.job_files import read_result, record_failure, write_json
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import atomic_folder, write_whole


def test_every_folder_is_in_job_dir(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("AIP_MODEL_DIR", "/elsewhere/model/")
    job_dir = open_job_dir(TrainConfig(job_dir=str(tmp_path / "a" / "b")))
    assert {folder.parent for folder in (job_dir.checkpoints, job_dir.logs, job_dir.model)} == {
        tmp_path / "a" / "b"
    }
    assert not job_dir.samples.exists()  # the first grid creates it


@parametrize(
    "folder, line",
    [
        ("", "job_dir is missing"),
        ("gs:/bucket/run", "did you mean gs://bucket/run?"),
        ("/proc/nothing/here", "cannot write there"),
        (__file__, "cannot write there (not a folder)"),
    ],
)
def test_unwritable_folders_are_refused(folder: str, line: str) -> None:
    with refused(line):
        open_job_dir(TrainConfig(job_dir=folder))


def test_a_run_of_a_version_before_0_3_is_not_resumed(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"versions": {"trainer": "0.2.0"}})
    with refused(f"{tmp_path}: written by a version before 0.3: use vertex-trainer 0.3 to read it"):
        open_job_dir(TrainConfig(job_dir=str(tmp_path)))


OPENED = """
import sys
from trainer.base.settings.train_config import TrainConfig
from trainer.base.run_files.job_directory import open_job_dir
open_job_dir(TrainConfig(job_dir=sys.argv[1]))
print("open", flush=True)
input()
"""


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPENED, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "open\n"
            with refused("another run is writing to it: wait, or use another --job_dir"):
                open_job_dir(TrainConfig(job_dir=str(tmp_path)))
            open_job_dir(TrainConfig(job_dir=str(tmp_path / "another")))
        finally:
            other.kill()  # which releases its lock
    open_job_dir(TrainConfig(job_dir=str(tmp_path)))
    open_job_dir(TrainConfig(job_dir=str(tmp_path)))


KILLED = """
import os, pathlib, sys
from trainer.base.storage import write_whole
write_whole(pathlib.Path(sys.argv[1]), lambda part: (part.touch(), os.kill(os.getpid(), 9)))
"""


def test_what_a_killed_process_was_writing_goes_with_the_next_start(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "result.json")], check=False)
    (part,) = tmp_path.glob(".result.json.*.part")
    others = [
        tmp_path / ".billed.json.elsewhere-7.part",
        tmp_path / f".x.{os.uname().nodename}-{os.getpid()}.part",
    ]
    for other in others:
        other.touch()
    open_job_dir(TrainConfig(job_dir=str(tmp_path)))
    assert [path.exists() for path in (part, *others)] == [False, True, True]


def test_settings_that_do_not_change_the_numbers_may_change(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"config": {"steps": 5, "replicas": 1, "seed": 3}})
    open_job_dir(TrainConfig(job_dir=str(tmp_path), steps=9, replicas=2, seed=3))
    open_job_dir(TrainConfig(job_dir=str(tmp_path), seed=4))  # no checkpoint exists yet
    (tmp_path / "checkpoints" / "ckpt-5.index").write_text("")
    with refused("seed: 3 before, 4 now"):
        open_job_dir(TrainConfig(job_dir=str(tmp_path), seed=4))


def test_a_wrong_path_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (
        tmp_path / "file" / "x",
        tmp_path / "none" / "x",
        tmp_path,
        tmp_path / ("x" * 300),
    ):
        with refused("cannot be written: "):
            write_whole(path, "new")


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path, monkeypatch: Patch) -> None:
    file = tmp_path / "result.json"
    write_whole(file, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused("result.json cannot be written: No space left on device: free or repair"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_two_processes_can_write_one_file_at_the_same_time(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    file = tmp_path / "x.json"
    sync = os.fsync

    def other_process_writes(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 1)
            write_whole(file, "of the other process")
        assert file.read_text() == "of the other process"

    monkeypatch.setattr(os, "fsync", other_process_writes)
    write_whole(file, "ours")
    assert file.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with atomic_folder(folder) as beside:
        (beside / "one").write_text("1")
    with refused("cannot be written: No such file"), atomic_folder(folder) as beside:
        (beside / "two" / "three").write_text("2")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "one"]


def test_the_first_failure_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"steps": 5, "state": "running"}')
    for error in ("first", "second"):
        record_failure(tmp_path, error)
    assert read_result(tmp_path) == ({"steps": 5, "state": "failed", "error": "first"}, "")
