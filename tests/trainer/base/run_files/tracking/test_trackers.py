"""Tests what MLflow's real store, W&B's real offline files and a tracker of a user's own have of a
run."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from deploy.__main__ import main
from tests.fixtures import Capture, Folders, Patch, parametrize
from tests.trainer.base.run_files.tracking.runs import (
    LOSSES,
    mlflow_files,
    mlflow_history,
    mlflow_runs,
    plant_run,
    wandb_records,
    wandb_rows,
)
from tests.trainer.base.storage.fault_proxy import serving
from tests.workers import until
from trainer.base.errors import UserError
from trainer.base.run_files.job_files import append_stats, drop_stats_after, write_json
from trainer.base.run_files.tracking.sender import TAGS, RunFiles, Sender, Tracking
from trainer.base.tracker import Opened, Point, TrackedRun, read_addresses

# MLflow's
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.fixture(scope="module")
def store(tmp_path_factory: Folders) -> str:
    """Returns the address of an empty database; a new one takes seconds, so each test has an
    experiment of its own."""
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed here")
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: Patch) -> None:
    """Keeps the files that MLflow stores beside the working folder out of the checkout."""
    monkeypatch.chdir(tmp_path)


def test_a_run_is_in_mlflow_once_however_often_it_is_sent(
    store: str, tmp_path: Path, capsys: Capture
) -> None:
    run = plant_run(tmp_path / "first", 20, state="interrupted")
    track = f"--track=mlflow:{store}#tests"
    assert main(["track", str(run), track]) == 0
    assert "first: killed, 2 steps sent" in capsys.readouterr().out
    [known] = mlflow_runs(store, "tests")
    assert known.info.status == "KILLED"
    drop_stats_after(run, 10)  # it was resumed at 10: the step 20 comes again, with more replicas
    plant_run(run, 30, first=10, replicas=2)
    for sent in (2, 0):
        assert main(["track", str(run), track]) == 0
        assert f"finished, {sent} steps sent" in capsys.readouterr().out
    [known] = mlflow_runs(store, "tests")
    assert (known.info.status, known.info.run_name) == ("FINISHED", "first")
    assert mlflow_history(store, known, "loss") == LOSSES
    assert mlflow_history(store, known, "epoch/loss") == [(20, 0.5)]
    assert mlflow_history(store, known, "result/wall_seconds") == [(30, 12.5)]
    assert not {
        name
        for name in known.data.metrics
        if name.startswith(("result/history", "result/written_at"))
    }
    assert known.data.params["learning_rate"] == "0.01"
    assert known.data.tags["commit"] == "c0ffee"
    assert known.data.tags["model"] == f"{run}/model"
    assert mlflow_files(store, known) == ["step-00000020.png", "step-00000030.png"]  # of each end


def test_changed_settings_and_odd_names_reach_mlflow(store: str, tmp_path: Path) -> None:
    run = plant_run(tmp_path / "run", 10, state="failed", replicas=1)
    append_stats(
        run, {"kind": "evaluation", "step": 10, "metrics": {"top[5]%": 0.9}, "time": 1.7e9}
    )
    send(f"mlflow:{store}#settings", run)
    plant_run(run, 20, first=10, replicas=2)
    send(f"mlflow:{store}#settings", run)
    [known] = mlflow_runs(store, "settings")
    assert (known.data.params["replicas"], known.data.tags["replicas"]) == ("1", "2")
    assert mlflow_history(store, known, "top_5__") == [(10, 0.9)]
    assert mlflow_history(store, known, "loss") == LOSSES[:2]


@parametrize(
    "status, code, line",
    [(401, 2, "the server refuses it (401)"), (503, 1, "run is not sent: ")],
)
def test_a_refused_login_is_no_outage(
    status: int, code: int, line: str, store: str, tmp_path: Path, capsys: Capture
) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

    with serving(Refusing) as address:
        assert (
            main(["track", str(plant_run(tmp_path / "run")), f"--track=mlflow:{address}#x"]) == code
        )
    error = capsys.readouterr().err
    assert line in error
    assert ("set MLFLOW_TRACKING_TOKEN" in error) == (code == 2)


def test_an_offline_file_of_wandb_has_each_step_once(tmp_path: Path, monkeypatch: Patch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed here")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = plant_run(tmp_path / "run", 20, state="interrupted")
    send("wandb:team/project", run)
    plant_run(run, 30, first=20)
    send("wandb:team/project", run)
    [file] = run.glob("wandb/offline-run-*/*.wandb")
    until(lambda: wandb_rows(file))  # a process of wandb's writes the file
    rows = wandb_rows(file)
    assert [(row["_step"], row["loss"]) for row in rows] == LOSSES
    assert [row["_timestamp"] for row in rows] == [1.7e9 + step for step, _ in LOSSES]
    assert rows[-1]["result/wall_seconds"] == 12.5
    assert rows[-1]["samples/_type"] == "image-file"
    kinds = {record.WhichOneof("record_type"): record for record in wandb_records(file)}
    assert kinds["exit"].exit.exit_code == 0
    known = kinds["run"].run
    assert (known.project, known.run_id, known.host) == ("project", "0123456789abcdef", "")


class Planted:
    """Has no answer for some time, refuses, or fails as often as asked. Meets `Tracker`."""

    def __init__(self, seconds: float = 0.0, failures: int = 0) -> None:
        self.seconds = seconds
        self.failures = failures
        self.refusal = ""
        self.points: list[tuple[int, str, float]] = []
        self.states: list[str] = []

    def begin(self, run: TrackedRun) -> Opened:
        time.sleep(self.seconds)
        last = {name: step for step, name, _ in self.points}
        return Opened("link", lambda name: last.get(name, -1))

    def send(self, run: TrackedRun, points: Any) -> None:
        if self.refusal:
            raise UserError(self.refusal)
        self.points += [
            (point.step, name, value) for point in points for name, value in point.values.items()
        ]
        self.states.append(run.state)
        if self.failures:
            self.failures -= 1
            raise OSError("the answer is lost")


def send(address: str, run: Path) -> None:
    [known] = read_addresses([address])
    Sender(known, RunFiles(run, str(run))).send(ended=True)


OWN = f"{__name__}:own_tracker#x"


@contextmanager
def following(tracker: Planted, run: Path, monkeypatch: Patch) -> Iterator[None]:
    """Sends a running training to a tracker of one's own; the block begins with its first points,
    if it answers."""
    monkeypatch.setattr(f"{__name__}.own_tracker", lambda address: tracker, raising=False)
    with Tracking([OWN], run, "gs://b/run") as tracking:
        tracking.begin()
        until(lambda: tracker.points or tracker.seconds)
        yield


def test_a_training_is_followed_and_lost_answers_double_nothing(
    tmp_path: Path, monkeypatch: Patch, caplog: Any
) -> None:
    tracker = Planted(failures=1)
    run = plant_run(tmp_path / "run", 20, state="running")
    with following(tracker, run, monkeypatch):
        assert {step for step, _, _ in tracker.points} == {10}  # more may come for the newest step
        plant_run(run, 30, first=20)
    assert [(step, value) for step, name, value in tracker.points if name == "loss"] == LOSSES
    assert tracker.states[-1] == "finished"
    assert set(tracker.states[:-1]) == {"running"}
    assert (
        caplog.messages[0]
        == f"track={OWN}: the answer is lost: training continues; metrics will be sent later"
    )
    assert re.fullmatch(rf"track={re.escape(OWN)}: \d+ steps sent: .*", caplog.messages[-1])


SEND = f"send it with `python -m deploy track gs://b/run --track={OWN}`"


def test_a_refusal_in_mid_run_is_told_at_the_end(
    tmp_path: Path, monkeypatch: Patch, caplog: Any
) -> None:
    """It neither ends the training nor is it tried again."""
    tracker = Planted()
    run = plant_run(tmp_path / "run", 20, state="running")
    with following(tracker, run, monkeypatch):
        tracker.refusal = "the token has expired"
        plant_run(run, 30, first=20)
    assert caplog.messages[-1] == f"track={OWN}: not all is sent (the token has expired): {SEND}"


def test_tags_name_the_job_that_submit_described(tmp_path: Path, monkeypatch: Patch) -> None:
    known = {
        "tier": "l4x1",
        "image": "r/x:1",
        "usd_per_hour": 0.8,
        "project": "p",
        "region": "us-central1",
    }
    monkeypatch.setenv(TAGS, json.dumps(known))
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "1000")
    tags = RunFiles(plant_run(tmp_path / "run"), "gs://b/run").run(ended=True).tags
    assert (tags["tier"], tags["image"], tags["usd_per_hour"]) == ("l4x1", "r/x:1", "0.8")
    assert tags["job"].endswith("/vertex-ai/locations/us-central1/training/1000?project=p")
    monkeypatch.delenv("CLOUD_ML_JOB_ID")  # as in a rehearsal
    assert "job" not in RunFiles(tmp_path / "run", "gs://b/run").run(ended=True).tags


def test_a_tracker_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    for name in ("_BEGINNING_S", "_ENDING_S"):
        monkeypatch.setattr(f"trainer.base.run_files.tracking.sender.{name}", 0.05)
    with following(Planted(seconds=30), plant_run(tmp_path / "run"), monkeypatch):
        pass
    begun, ended = caplog.messages
    assert begun == f"track={OWN}: no answer within 0.05 seconds: the training begins without it"
    assert ended.endswith(SEND)


@parametrize(
    "text, line",
    [
        ("mlfow:http://x#y", "track=mlfow:http://x#y: no such tracker: write mlflow:http"),
        ("mlflow:http://x", "track=mlflow:http://x: not of the form of this tracker"),
        ("vertex:Upper", "track=vertex:Upper: not of the form"),
        ("wandb:a/b/c", "track=wandb:a/b/c: not of the form"),
        ("mlflow:http://me:secret@x#y", "track=mlflow:… holds a user, a password"),
        ("mlflow:http://x?token=secret#y", "track=mlflow:… holds a user, a password"),
        ("no.such:tracker", "track=no.such:tracker: cannot import no.such:tracker"),
    ],
)
def test_an_address_of_another_form_is_refused(
    text: str, line: str, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["track", str(plant_run(tmp_path / "run")), f"--track={text}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line}")
    assert "secret" not in error


@parametrize("started", ["2026-11-01T00:00:00Z", "2026-11-01T01:00:00+01:00"])
def test_points_have_the_times_of_their_lines_or_the_start_of_the_run(
    started: str, tmp_path: Path
) -> None:
    """The trainer writes the first form, the record of a script the second."""
    write_json(tmp_path / "run.json", {"started": started})
    append_stats(
        tmp_path,
        {"kind": "report", "step": 1, "gpus": [{"memory_gib": 2.0, "utilization_percent": None}]},
    )
    append_stats(
        tmp_path, {"kind": "report", "step": 2, "losses": {"loss": float("nan")}, "time": 1.8e9}
    )
    assert RunFiles(tmp_path, "x").points(ended=True) == [
        Point(1, 1793491200.0, {"gpus/0/memory_gib": 2.0}),
        Point(2, 1.8e9, {}),
    ]


def test_the_tracker_of_the_page_runs(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    page = (Path(__file__).parents[5] / "docs" / "tracking.md").read_text(encoding="utf-8")
    (tmp_path / "csv_tracker.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = plant_run(tmp_path / "run")
    for _ in range(2):
        assert main(["track", str(run), "--track=csv_tracker:open_csv#."]) == 0
    rows = [
        line.split(",") for line in (tmp_path / "0123456789abcdef.csv").read_text().splitlines()
    ]
    assert [(int(step), float(value)) for name, step, value in rows if name == "loss"] == LOSSES
