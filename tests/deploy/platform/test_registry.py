"""Tests the Model Registry: a run is one version, however answers are lost, and its rows are
answered by one job."""

import json
from pathlib import Path

import pytest

from deploy.__main__ import main
from tests.deploy.conftest import BY_SDK, Capture, Command, FlyingClock, Job, task_of
from tests.deploy.emulator import Emulator, Fault
from trainer.base.run_files.serving_file import write_servable

IMAGE = "us-docker.pkg.dev/my-proj/r/trainer:1"
PLACE = ["--region=us-central1", "--bucket=gs://my-bucket"]

NAMED = ["--name=digits", f"--image={IMAGE}"]


def a_run(name: str = "a", weights: bytes = b"weights") -> Path:
    """Returns the job directory of a run that is done, without TensorFlow."""
    folder = Path(name)
    (folder / "model" / "saved_model").mkdir(parents=True, exist_ok=True)
    for name in ("model.keras", "saved_model/saved_model.pb"):
        (folder / "model" / name).write_bytes(weights)
    write_servable(
        folder / "model",
        inputs={"x": ("float32", [2, None]), "text": ("string", [])},
        outputs={"predictions": ("float32", [3])},
    )
    (folder / "run.json").write_text(
        '{"config": {"recipe": "r"}, "git_commit": "abc", "data": {"content": {"rows": "1f"}}}'
    )
    (folder / "result.json").write_text(
        '{"state": "done", "steps": 9, "final": {"metrics": {"accuracy": 0.5}}}'
    )
    return folder


# to predict, and where to
ROWS = ("gs://my-bucket/rows.jsonl", "gs://my-bucket/out", "--region=us-central1")


def register(folder: Path, *more: str) -> None:
    assert main(["register", str(folder), *NAMED, *PLACE, *more]) == 0


def test_a_run_is_one_version_and_aliases_move_only_when_asked(
    cloud: Emulator, capsys: Capture
) -> None:
    first = a_run()
    second = a_run("b", b"other weights")
    register(first, "--alias=champion")
    for folder in (first, second, second, first):
        register(folder)
    assert [version["versionAliases"] for version in cloud.models] == [["default", "champion"], []]
    register(second, "--alias=champion")
    assert [version["versionAliases"] for version in cloud.models] == [["default"], ["champion"]]
    assert capsys.readouterr().out.endswith("/models/digits@2 (champion)\n")
    model, _ = cloud.models
    about = json.loads(model["versionDescription"])
    assert about["commit"] == "abc"
    assert about["data"] == {"rows": "1f"}
    assert about["metrics"] == {"accuracy": 0.5}
    assert about["steps"] == 9
    assert model["containerSpec"]["command"] == ["python", "-m", "trainer.serve"]
    assert f"{model['artifactUri']}/serving.json".removeprefix("gs://") in cloud.objects


@pytest.mark.parametrize(
    "fault",
    [
        Fault("POST .*models:upload", "cut", after=True),
        Fault("POST .*models:upload", 503, times=3),
        Fault("POST .*models:upload", "html", after=True),
        Fault("GET .*operations", 500, times=2),
        Fault("GET .*:listVersions", "cut"),
        Fault("POST .*:mergeVersionAliases", 503, after=True),
    ],
)
def test_a_lost_answer_makes_no_second_version(fault: Fault, cloud: Emulator) -> None:
    cloud.faults = [fault]
    register(a_run(), "--alias=champion")
    assert [version["versionAliases"] for version in cloud.models] == [["default", "champion"]]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--name=Digits", f"--image={IMAGE}"], "name=Digits: use small letters"),
        ([*NAMED, "--alias=1"], "alias=1: use letters"),
        (["--name=digits", "--image=install"], "a server needs an image with all packages"),
        (["--name=digits"], "no image to serve the model"),
    ],
)
def test_wrong_flags_of_a_version_are_refused(
    flags: list[str], line: str, refused: Command
) -> None:
    assert line in refused("register", str(a_run()), *flags, *PLACE, "--project=p")


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("serving.json", "", "there is no serving.json: name the job directory of"),
        ("model.keras", "", "there is no model.keras: name the job directory of"),
        ("model.keras", "[]", "model.keras is not the file that was exported"),
        ("serving.json", "[]", "its serving.json cannot be read"),
    ],
)
def test_what_cannot_be_registered_is_one_line(
    name: str, content: str, line: str, refused: Command
) -> None:
    file = a_run() / "model" / name
    file.write_text(content)
    if not content:
        file.unlink()
    assert line in refused("register", "a", *NAMED, *PLACE, "--project=p")


def test_rows_are_answered_by_one_capped_job_in_the_image_of_the_version(
    cloud: Emulator, flying: FlyingClock, typed: Command
) -> None:
    """The same command follows the job that it lost."""
    register(a_run(), "--alias=champion")
    cloud.objects["my-bucket/rows.jsonl"] = b"[1]\n"
    command = ["digits@champion", *ROWS, "--tier=l4x1", "--max_cost=1", "--max_wait=1h", "--spot"]
    flying.asleep = flying.interrupt
    typed("predict", *command, "--backend=sdk", code=75)
    flying.asleep = lambda: cloud.end(cloud.job, "SUCCEEDED")
    typed("predict", *command, "--backend=sdk")
    task = task_of(cloud.job)
    (model,) = cloud.models
    assert task["imageUri"] == IMAGE
    assert task["command"] == ["python", "-m", "trainer.predict"]
    rows = ["--rows_file=gs://my-bucket/rows.jsonl", "--out=gs://my-bucket/out"]
    assert task["args"] == [model["artifactUri"], *rows]
    scheduling = cloud.job["jobSpec"]["scheduling"]
    assert scheduling["strategy"] == "SPOT"
    assert 600 < float(scheduling["timeout"][:-1]) < 86_400


def test_a_dry_run_prints_the_requests_and_sends_none(cloud: Emulator, capsys: Capture) -> None:
    folder = a_run()
    register(folder, "--dry_run")
    first, _, text = capsys.readouterr().out.partition("\n")
    assert first == "POST projects/my-proj/locations/us-central1/models:upload"
    assert json.loads(text)["model"]["containerSpec"]["imageUri"] == IMAGE
    assert cloud.models == []
    assert cloud.objects == {}


def test_a_job_that_ends_well_registers_its_model(cloud: Emulator, typed: Command) -> None:
    """One that fails registers nothing."""
    folder = a_run()

    def trains(google: Emulator, job: Job) -> None:
        google.begin(job)
        for path in folder.rglob("*.*"):
            google.objects[f"my-bucket/runs/7/{path.relative_to(folder)}"] = path.read_bytes()
        google.end(job, state)

    cloud.run = trains
    flags = ["--register=digits", f"--image={IMAGE}", "--job_dir=gs://my-bucket/runs/7"]
    for state in ("FAILED", "SUCCEEDED"):
        typed("submit", "cpu", *BY_SDK, *flags, code=state == "FAILED")
    (model,) = cloud.models
    assert model["artifactUri"] == "gs://my-bucket/runs/7/model"
    assert "/us-central1/training/1001?project=my-proj" in model["versionDescription"]
