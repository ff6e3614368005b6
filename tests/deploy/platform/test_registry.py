"""Tests the Model Registry: a run is one version, however answers are lost, and its rows are
answered by one job."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import predict, runs, submit
from deploy.platform.gcloud_and_sdk import Session
from tests.deploy.conftest import JOB, Capture, Command, FlyingClock, run
from tests.deploy.emulator import Emulator, Fault
from trainer.base.run_files.serving_file import write_servable

IMAGE = "us-docker.pkg.dev/my-proj/r/trainer:1"
PLACE = ["--region=us-central1", "--bucket=gs://my-bucket"]


def a_run(folder: Path, weights: bytes = b"weights") -> Path:
    """Returns the job directory of a run that is done, without TensorFlow."""
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


def registered(session: Session, folder: Path, *more: str) -> int:
    return runs.run_register(
        [str(folder), "--name=digits", f"--image={IMAGE}", *PLACE, *more], session
    )


def test_a_run_is_one_version_and_aliases_move_only_when_asked(
    cloud: Emulator, session: Session, tmp_path: Path, capsys: Capture
) -> None:
    first = a_run(tmp_path / "a")
    second = a_run(tmp_path / "b", b"other weights")
    for folder, alias in (
        (first, ["--alias=champion"]),
        (first, []),
        (second, []),
        (second, []),
        (first, []),
    ):
        assert registered(session, folder, *alias) == 0
    assert [version["versionAliases"] for version in cloud.models] == [["default", "champion"], []]
    assert registered(session, second, "--alias=champion") == 0
    assert [version["versionAliases"] for version in cloud.models] == [["default"], ["champion"]]
    assert capsys.readouterr().out.splitlines()[-1].endswith("/models/digits@2 (champion)")
    model, _ = cloud.models
    about = json.loads(model["versionDescription"])
    assert (about["commit"], about["data"], about["metrics"], about["steps"]) == (
        "abc",
        {"rows": "1f"},
        {"accuracy": 0.5},
        9,
    )
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
    ids=lambda fault: f"{fault.match[-8:]}-{fault.kind}",
)
def test_a_lost_answer_makes_no_second_version(
    fault: Fault, cloud: Emulator, session: Session, tmp_path: Path
) -> None:
    cloud.faults = [fault]
    assert registered(session, a_run(tmp_path / "a"), "--alias=champion") == 0
    assert [version["versionAliases"] for version in cloud.models] == [["default", "champion"]]


NAMED = ["--name=digits", f"--image={IMAGE}"]


@pytest.mark.parametrize(
    ("change", "flags", "line"),
    [
        (None, ["--name=Digits", f"--image={IMAGE}"], "name=Digits: use small letters"),
        (None, [*NAMED, "--alias=1"], "alias=1: use letters"),
        (None, ["--name=digits", "--image=install"], "a server needs an image with all packages"),
        (None, ["--name=digits"], "no image to serve the model"),
        (
            lambda model: (model / "serving.json").unlink(),
            NAMED,
            "there is no serving.json: name the job directory of",
        ),
        (
            lambda model: (model / "model.keras").unlink(),
            NAMED,
            "there is no model.keras: name the job directory of",
        ),
        (
            lambda model: (model / "model.keras").write_text("[]"),
            NAMED,
            "model.keras is not the file that was exported",
        ),
        (
            lambda model: (model / "serving.json").write_text("[]"),
            NAMED,
            "its serving.json cannot be read",
        ),
    ],
)
def test_what_cannot_be_registered_is_one_line(
    change: Callable[[Path], object] | None,
    flags: list[str],
    line: str,
    tmp_path: Path,
    refused: Command,
) -> None:
    folder = a_run(tmp_path / "a")
    if change:
        change(folder / "model")
    assert line in refused("register", str(folder), *flags, *PLACE, "--project=p")


def test_rows_are_answered_by_one_capped_job_in_the_image_of_the_version(
    cloud: Emulator, session: Session, flying: FlyingClock, tmp_path: Path
) -> None:
    """The same command follows the job that it lost."""
    assert registered(session, a_run(tmp_path / "a"), "--alias=champion") == 0
    cloud.objects["my-bucket/rows.jsonl"] = b"[1]\n"
    command = ["digits@champion", *ROWS, "--tier=l4x1", "--max_cost=1", "--max_wait=1h", "--spot"]
    flying.asleep = flying.interrupt
    assert predict.main([*command, "--backend=sdk"], session) == 75
    (job,) = cloud.jobs.values()
    flying.asleep = lambda: cloud.end(job, "SUCCEEDED")
    assert predict.main([*command, "--backend=sdk"], session) == 0
    assert len(cloud.jobs) == 1
    task = job["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    (model,) = cloud.models
    assert (task["imageUri"], task["command"]) == (IMAGE, ["python", "-m", "trainer.predict"])
    rows = ["--rows_file=gs://my-bucket/rows.jsonl", "--out=gs://my-bucket/out"]
    assert task["args"] == [model["artifactUri"], *rows]
    assert job["jobSpec"]["scheduling"]["strategy"] == "SPOT"
    assert 600 < float(job["jobSpec"]["scheduling"]["timeout"].removesuffix("s")) < 86_400


def test_a_dry_run_prints_the_requests_and_sends_none(
    cloud: Emulator, session: Session, tmp_path: Path, capsys: Capture
) -> None:
    folder = a_run(tmp_path / "a")
    assert registered(session, folder, "--dry_run") == 0
    first, _, text = capsys.readouterr().out.partition("\n")
    assert first == "POST projects/my-proj/locations/us-central1/models:upload"
    assert json.loads(text)["model"]["containerSpec"]["imageUri"] == IMAGE
    assert (cloud.models, cloud.objects) == ([], {})
    assert registered(session, folder) == 0
    cloud.objects["my-bucket/rows.jsonl"] = b"[1]\n"
    capsys.readouterr()
    assert (
        predict.main(["digits", *ROWS, "--tier=l4x1", "--dry_run", "--backend=sdk"], session) == 0
    )
    assert capsys.readouterr().out.startswith("answers the rows of gs://my-bucket/rows.jsonl with ")
    assert not cloud.jobs
    assert not cloud.bodies


EXPORT = """
import sys
from pathlib import Path
import keras
from trainer.run.export import export
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
export(model, Path(sys.argv[1]), None)
"""


@pytest.mark.slow
def test_the_job_answers_the_rows_by_the_real_command(
    cloud: Emulator, session: Session, tmp_path: Path, capsys: Capture
) -> None:
    folder = a_run(tmp_path / "a")
    shutil.rmtree(folder / "model")
    made = run([sys.executable, "-c", EXPORT, str(folder / "model")])
    assert made.returncode == 0, made.stderr
    assert registered(session, folder) == 0
    cloud.objects["my-bucket/rows.jsonl"] = b"[1, 2]\n{\n[3, 4]\n"

    def predicts(google: Emulator, job: dict[str, Any]) -> None:
        google.begin(job)
        task = job["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
        done = run([sys.executable, *task["command"][1:], *task["args"]])
        google.end(job, "FAILED" if done.returncode else "SUCCEEDED", done.stderr)

    cloud.run = predicts
    assert (
        predict.main(["digits", *ROWS, "--tier=cpu", "--max_cost=1", "--backend=sdk"], session) == 0
    )
    answers = cloud.objects["my-bucket/out/predictions-00000.jsonl"].splitlines()
    assert [json.loads(line)["row"] for line in answers] == [0, 2]
    assert json.loads(cloud.objects["my-bucket/out/errors-00000.jsonl"])["row"] == 1


def test_a_job_that_ends_well_registers_its_model(
    cloud: Emulator, session: Session, tmp_path: Path
) -> None:
    """One that fails registers nothing."""
    folder = a_run(tmp_path / "a")

    def trains(google: Emulator, job: dict[str, Any]) -> None:
        google.begin(job)
        for path in folder.rglob("*.*"):
            if path.is_file():
                google.objects[f"my-bucket/runs/7/{path.relative_to(folder)}"] = path.read_bytes()
        google.end(job, state)

    cloud.run = trains
    command = [
        "cpu",
        *JOB,
        *PLACE,
        "--register=digits",
        f"--image={IMAGE}",
        "--job_dir=gs://my-bucket/runs/7",
    ]
    for state in ("FAILED", "SUCCEEDED"):
        assert submit.main([*command, "--backend=sdk"], session) == (state == "FAILED")
    (model,) = cloud.models
    assert model["artifactUri"] == "gs://my-bucket/runs/7/model"
    assert json.loads(model["versionDescription"])["job"].endswith(
        "/us-central1/training/1001?project=my-proj"
    )
