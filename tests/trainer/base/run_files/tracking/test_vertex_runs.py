"""Tests runs in Vertex AI Experiments, which Google's SDK reads back from an emulation of its
services."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.auth.credentials import AnonymousCredentials

import tests.trainer.base.run_files.tracking.experiments  # noqa: F401 (its addresses become those of the emulator)
from deploy.__main__ import main
from tests.deploy.emulator import Emulator, Fault
from tests.fixtures import Capture, Patch, parametrize
from tests.trainer.base.run_files.tracking.runs import LOSSES, plant_run
from trainer.base.run_files.job_files import drop_stats_after
from trainer.base.run_files.tracking import vertex_runs

PARENT = "projects/my-proj/locations/us-central1"
TRACK = "--track=vertex:gan-tests"


@pytest.fixture
def google(tmp_path: Path, monkeypatch: Patch) -> Iterator[Emulator]:
    """Yields the emulated services."""
    (tmp_path / "token").write_text("not-a-secret")
    with Emulator() as google:
        here = {"CLOUDSDK_CONFIG": str(tmp_path / "gcloud"), "CLOUDSDK_AI_REGION": "us-central1"}
        for name, value in (google.environment(tmp_path / "token") | here).items():
            monkeypatch.setenv(name, value)
        yield google


def test_googles_sdk_reads_what_was_sent(google: Emulator, tmp_path: Path, capsys: Capture) -> None:
    from google.cloud import aiplatform

    run = plant_run(tmp_path / "first", 20, state="interrupted")
    assert main(["track", str(run), TRACK]) == 0
    drop_stats_after(run, 10)
    plant_run(run, 30, first=10)
    for sent in (2, 0):
        assert main(["track", str(run), TRACK]) == 0
        assert f"finished, {sent} steps sent" in capsys.readouterr().out
    place = {"project": "my-proj", "location": "us-central1", "credentials": AnonymousCredentials()}
    aiplatform.init(**place, api_endpoint=google.url, api_transport="rest")
    known = aiplatform.ExperimentRun("0123456789abcdef", experiment="gan-tests", **place)
    assert known.state.name == "COMPLETE"
    assert known.get_params()["learning_rate"] == "0.01"
    assert known.get_params()["tag.commit"] == "c0ffee"
    assert known.get_metrics()["result/wall_seconds"] == 12.5
    assert [run.name for run in aiplatform.ExperimentRun.list(experiment="gan-tests", **place)] == [
        "first"
    ]
    series = known._backing_tensorboard_run.resource.read_time_series_data()
    assert [(point.step, point.scalar.value) for point in series["loss"].values] == LOSSES
    if importlib.util.find_spec("pandas"):  # which the SDK's data frame needs
        frame = known.get_time_series_data_frame()
        assert [*zip(frame["step"], frame["loss"], strict=True)] == LOSSES


def test_what_is_there_is_used_unless_it_is_something_else(
    google: Emulator, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    board = f"{PARENT}/tensorboards/7"
    run = str(plant_run(tmp_path / "run"))
    google.resources[board] = {"name": board, "displayName": "of the team"}
    monkeypatch.setenv(vertex_runs.TENSORBOARD, board)
    assert main(["track", run, TRACK]) == 0
    assert [
        name for name in google.resources if name.count("/") == 5 and "/tensorboards/" in name
    ] == [board]
    context = google.resources[f"{PARENT}/metadataStores/default/contexts/gan-tests"]
    assert context["metadata"]["backing_tensorboard_resource"] == board
    context["schemaTitle"] = "system.Pipeline"
    assert main(["track", run, TRACK]) == 2
    assert "gan-tests is a system.Pipeline in projects/my-proj/" in capsys.readouterr().err
    monkeypatch.delenv("CLOUDSDK_CORE_PROJECT")
    assert main(["track", run, TRACK]) == 2
    assert "track=vertex:gan-tests: project and region are not known" in capsys.readouterr().err


@parametrize(
    "status, code, line",
    [(403, 2, "Vertex AI refuses it (403): "), (503, 1, "run is not sent: 503 Server Error")],
)
def test_a_refusal_names_the_role_and_an_outage_is_retried_later(
    google: Emulator, tmp_path: Path, capsys: Capture, status: int, code: int, line: str
) -> None:
    google.faults = [Fault("GET .*", status, times=9)]
    assert main(["track", str(plant_run(tmp_path / "run")), TRACK]) == code
    error = capsys.readouterr().err
    assert error.startswith("error: track=vertex:gan-tests: ")
    assert line in error
    assert ("roles/aiplatform.user" in error) == (code == 2)
