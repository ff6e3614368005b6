"""Provides emulated Google services, the environment for gcloud and the SDK, a fast clock, and
commands on them."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.deploy.image_emulator
import tests.deploy.registry_emulator  # noqa: F401 (their addresses become those of the emulator)
from deploy.__main__ import main
from deploy.base.console import printed_on
from deploy.platform.gcloud_and_sdk import BACKENDS
from deploy.platform.rest import Platform
from deploy.platform.retries import CLOCK
from deploy.report.collection import collect
from deploy.report.measures import TierSummary, summarize
from tests.deploy.emulator import Emulator
from tests.deploy.planted import content, noisy, plant, sample
from tests.deploy.readiness_emulator import ACCOUNT, ALL
from tests.fixtures import Capture, Json, Patch
from trainer.base.errors import UserError
from trainer.base.storage import gcs
from trainer.base.storage.local_files import Address, parse

Job = Json
Command = Callable[..., str]
ROOT = Path(__file__).parents[2]
WHERE = ["--region=us-central1", "--bucket=gs://my-bucket"]
JOB = [
    "--model=mlp",
    "--data=digits",
    "--image_size=8",
    "--steps=4",
    "--report_every_steps=2",
    "--global_batch_size=8",
]
BY_SDK = [*WHERE, *JOB, "--backend=sdk"]
needs_gcloud = pytest.mark.skipif(
    shutil.which("gcloud") is None, reason="gcloud is not installed here"
)


@pytest.fixture(autouse=True)
def _printed() -> Iterator[None]:
    """Prints what verbs say, also those that a test calls without `deploy.__main__`."""
    with printed_on(None, command=True):
        yield


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, dist: Path, monkeypatch: Patch) -> None:
    """Sets a temporary working folder, shared built packages and an empty gcloud configuration."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.delenv("CLOUDSDK_CORE_PROJECT", raising=False)


@pytest.fixture(autouse=True)
def _pictures_of_reports_alone(request: pytest.FixtureRequest, monkeypatch: Patch) -> None:
    """Draws no picture but in tests of reports: matplotlib takes a second for each."""
    if "report" not in request.node.path.as_posix():
        monkeypatch.setattr("deploy.report.plots.picture", lambda *plot, **look: b"")


def put(folder: Path, address: Address) -> None:
    """Uploads all files of `folder`."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            gcs.connect().upload(file, address / file.relative_to(folder).as_posix())


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of an environment without any package."""
    folder = tmp_path_factory.mktemp("bare")
    assert run([sys.executable, "-m", "venv", "--without-pip", str(folder)]).returncode == 0
    return folder / "bin" / "python3"


class FlyingClock:
    """Provides a clock whose sleeps take no time; each calls `asleep`."""

    def __init__(self) -> None:
        self.time = time.time()
        self.slept = 0.0
        self.asleep: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.slept += seconds
        self.asleep()
        time.sleep(0.005)  # lets other threads run

    def interrupt(self) -> None:
        raise KeyboardInterrupt

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Calls the action once, at the first sleep that ends so many seconds from now."""
        due = self.time + seconds

        def asleep() -> None:
            if self.time >= due:
                self.asleep = lambda: None
                action()

        self.asleep = asleep


@pytest.fixture
def flying() -> FlyingClock:
    return FlyingClock()


@pytest.fixture
def cloud(tmp_path: Path, flying: FlyingClock, monkeypatch: Patch) -> Iterator[Emulator]:
    """Yields the emulator, and directs gcloud, the SDK and every command to it; a command has the
    fast clock."""
    token = tmp_path / "token"
    token.write_text("not-a-secret")
    vars(ACCOUNT).update(ALL)
    monkeypatch.setitem(vars(CLOCK), "now", lambda: flying.time)
    monkeypatch.setitem(vars(CLOCK), "sleep", flying.sleep)
    with Emulator() as google:
        for name, value in google.environment(token).items():
            monkeypatch.setenv(name, value)
        yield google


@pytest.fixture(params=[pytest.param("gcloud", marks=needs_gcloud), "sdk"])
def backend(request: pytest.FixtureRequest, cloud: Emulator) -> Platform:
    return BACKENDS[request.param]("my-proj", "us-central1")


def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **more)


def stand_in(script: str, monkeypatch: Patch) -> None:
    """Puts a fake gcloud first on the PATH, since the real one does not fail on demand."""
    gcloud = Path("gcloud").absolute()
    gcloud.write_text(f"#!/bin/sh\n{script}\n")
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gcloud.parent}:{os.environ['PATH']}")


def error_of(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Returns the error of a call that must raise a UserError."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    return str(caught.value)


@pytest.fixture
def typed(capsys: Capture) -> Command:
    """Returns a function that runs a command, expects its exit code, and returns what it printed:
    the document alone, or all, with the notes and errors at the end."""

    def run(*words: str, code: int = 0) -> str:
        assert main([*words]) == code
        out, error = capsys.readouterr()
        return out if {"--json", "--spec"} & {*words} and not code else out + error

    return run


@pytest.fixture
def refused(capsys: Capture) -> Command:
    """Returns a function that runs a command that must be refused, and returns its error, which
    must be one line."""

    def run(*arguments: str) -> str:
        assert main([*arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    return run


def attempts() -> list[Json]:
    """Returns the attempts of the one submission of this test."""
    (file,) = Path("runs/submitted").glob("*.json")
    return content(file)["attempts"]


def task_of(job: Json) -> Json:
    """Returns the container of the first pool of a job, or of a spec."""
    task: Json = job.get("jobSpec", job)["workerPoolSpecs"][0]["containerSpec"]
    return task


def variables_of(task: Json) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in task["env"]}


def start_of(task: Json) -> Any:
    """Returns what the start command of a plain image is told."""
    return json.loads(variables_of(task)["TRAINER_START"])


def tier_of(job: Job) -> str:
    """Returns the tier from the display name, mlp-TIER-SUBMISSION."""
    return str(job["displayName"]).split("-")[1]


def output_of(job: Job) -> Address:
    address = parse(job["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"], "output")
    assert address
    return address


def trains(folder: Path) -> Callable[[Emulator, Job], None]:
    """Returns a job that uploads a planted job directory; its speed is proportional to its
    devices."""

    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        devices = int(
            job["jobSpec"]["workerPoolSpecs"][0]["machineSpec"].get("acceleratorCount", 1)
        )
        local = plant(
            folder / job["displayName"],
            noisy(0.1 / devices),
            devices=[f"GPU:{i}" for i in range(devices)],
        )
        sample(local)
        (local / "checkpoints").mkdir()
        (local / "checkpoints" / "weights").write_bytes(b"large")
        google.log(job, f"trains on {devices}")
        put(local, output_of(job))
        google.end(job, "SUCCEEDED")

    return run


@pytest.fixture
def target(bucket: Address) -> list[str]:
    """Returns the flags of a comparison on Vertex AI: where it runs, and --out."""
    return ["--on=vertex", "--region=us-central1", f"--bucket={bucket}".rstrip("/"), "--out=out"]


@pytest.fixture
def command(cloud: Emulator, target: list[str], tmp_path: Path, typed: Command) -> Command:
    """Returns a function that runs `compare` on Vertex AI, as `typed`."""
    cloud.run = trains(tmp_path / "trained")
    image = ["--backend=sdk", "--image=us-docker.pkg.dev/p/r/x:1"]
    return lambda *words, code=0: typed("compare", *words, *target, *image, *JOB, code=code)


def rows() -> list[TierSummary]:
    return summarize(collect(["out"]))


def is_alive(process: str) -> bool:
    """Returns whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in (
            "Z",
            "X",
        )
    except (FileNotFoundError, ProcessLookupError):
        return False
