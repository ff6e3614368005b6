"""Tests runs in Vertex AI Experiments, which Google's SDK reads back from an emulation of its services."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.auth.credentials import AnonymousCredentials

from deploy.__main__ import main
from tests.trainer.base.run_files.tracking.experiments import Experiments, serving_of
from tests.trainer.base.run_files.tracking.runs import LOSSES, plant_run
from trainer.base.run_files.job_files import drop_stats_after
from trainer.base.run_files.tracking import vertex_runs

PARENT = "projects/my-proj/locations/us-central1"
TRACK = "--track=vertex:gan-tests"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def vertex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Experiments, str]]:
    """Yields the emulated services and their address."""
    experiments = Experiments()
    monkeypatch.setattr(vertex_runs, "credentials", AnonymousCredentials)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("CLOUDSDK_CORE_PROJECT", "my-proj")
    monkeypatch.setenv("CLOUDSDK_AI_REGION", "us-central1")
    with serving_of(experiments) as address:
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", f"{address}/")
        yield experiments, address


def test_googles_sdk_reads_what_was_sent(vertex: tuple[Experiments, str], tmp_path: Path, capsys: Capture) -> None:
    from google.cloud import aiplatform

    address = vertex[1]
    run = plant_run(tmp_path / "first", 20, state="interrupted")
    assert main(["track", str(run), TRACK]) == 0
    drop_stats_after(run, 10)
    plant_run(run, 30, first=10)
    for sent in (2, 0):
        assert main(["track", str(run), TRACK]) == 0
        assert f"finished, {sent} steps sent" in capsys.readouterr().out
    place = {"project": "my-proj", "location": "us-central1", "credentials": AnonymousCredentials()}
    aiplatform.init(**place, api_endpoint=address, api_transport="rest")
    known = aiplatform.ExperimentRun("0123456789abcdef", experiment="gan-tests", **place)
    assert known.state.name == "COMPLETE"
    assert known.get_params()["learning_rate"] == "0.01"
    assert known.get_params()["tag.commit"] == "c0ffee"
    assert known.get_metrics()["result/wall_seconds"] == 12.5
    assert [run.name for run in aiplatform.ExperimentRun.list(experiment="gan-tests", **place)] == ["first"]
    series = known._backing_tensorboard_run.resource.read_time_series_data()
    assert [(point.step, point.scalar.value) for point in series["loss"].values] == LOSSES
    if importlib.util.find_spec("pandas"):  # which the SDK's data frame needs
        frame = known.get_time_series_data_frame()
        assert [*zip(frame["step"], frame["loss"], strict=True)] == LOSSES


def test_what_is_there_is_used_unless_it_is_something_else(
    vertex: tuple[Experiments, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    experiments, _ = vertex
    board, run = f"{PARENT}/tensorboards/7", str(plant_run(tmp_path / "run"))
    experiments.resources[board] = {"name": board, "displayName": "of the team"}
    monkeypatch.setenv(vertex_runs.TENSORBOARD, board)
    assert main(["track", run, TRACK]) == 0
    assert [name for name in experiments.resources if name.count("/") == 5 and "/tensorboards/" in name] == [board]
    context = experiments.resources[f"{PARENT}/metadataStores/default/contexts/gan-tests"]
    assert context["metadata"]["backing_tensorboard_resource"] == board
    context["schemaTitle"] = "system.Pipeline"
    assert main(["track", run, TRACK]) == 2
    assert "gan-tests is a system.Pipeline in projects/my-proj/" in capsys.readouterr().err
    monkeypatch.delenv("CLOUDSDK_CORE_PROJECT")
    assert main(["track", run, TRACK]) == 2
    assert "track=vertex:gan-tests: project and region are not known" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code", "line"), [
    (403, 2, "Vertex AI refuses it (403): "), (503, 1, "run is not sent: 503 Server Error"),
])  # fmt: skip
def test_a_refusal_names_the_role_and_an_outage_is_retried_later(
    vertex: tuple[Experiments, str], tmp_path: Path, capsys: Capture, status: int, code: int, line: str
) -> None:
    vertex[0].refusal = status
    assert main(["track", str(plant_run(tmp_path / "run")), TRACK]) == code
    error = capsys.readouterr().err
    assert error.startswith("error: track=vertex:gan-tests: ")
    assert line in error
    assert ("roles/aiplatform.user" in error) == (code == 2)
