"""Tests comparisons on Vertex AI that fail before, in or after their jobs, and how they resume."""

import re
import shutil
import signal
import threading
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from deploy.comparison.runners import VertexRunner
from tests.deploy.conftest import Command, FlyingClock, Job, output_of, put, rows, tier_of
from tests.deploy.emulator import POSTS, QUOTA, Emulator, Fault, ends
from tests.deploy.planted import plant
from tests.fixtures import Patch
from trainer.base.storage.local_files import Address

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


def test_a_stop_after_the_upload_submits_nothing(
    command: Command, cloud: Emulator, monkeypatch: Patch
) -> None:
    """No run submits a job."""
    preflight = VertexRunner.preflight

    def stopped(runner: VertexRunner, runs: Any) -> None:
        preflight(runner, runs)
        runner.stopped.set()

    monkeypatch.setattr(VertexRunner, "preflight", stopped)
    command("l4x1", "l4x2", "l4x4", "--parallel=3", code=75)
    assert cloud.jobs == {}


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (401, "(401): run `gcloud auth login`"),
        (403, "request roles/aiplatform.user on my-proj"),
        (0, "photos: no objects found: check with"),
    ],
)
def test_what_stops_all_jobs_is_reported_once(
    status: int, line: str, command: Command, cloud: Emulator, bucket: Address
) -> None:
    cloud.faults = [Fault("GET .*/customJobs$", status, times=99)] if status else []
    missing = [] if status else [f"--initial_model={bucket}photos"]
    assert command("l4x1", "l4x2", "--repeats=3", *missing, code=2).count(line) == 1
    assert len(cloud.requests) == 1 or not status


def test_a_tier_without_quota_is_recorded_and_the_others_run(
    command: Command, cloud: Emulator
) -> None:
    cloud.faults = [Fault(POSTS, 429, times=1, message=QUOTA)]
    shown = command("l4x1", "l4x2", "--parallel=1", code=2)
    assert (
        "l4x1, repeat 1: no quota left in us-central1 for aiplatform.googleapis.com/custom_model"
        in shown
    )
    assert [row.state for row in rows()] == ["failed", "done"]
    assert "l4x1: the run ended as 'failed': not submitted: no quota left in us-central1" in shown
    command("l4x1", "l4x2")
    assert [tier_of(job) for job in cloud.jobs.values()] == ["l4x2", "l4x1"]
    assert [row.state for row in rows()] == ["done", "done"]


def test_a_job_that_fails_is_submitted_again_into_the_same_output(
    command: Command, cloud: Emulator
) -> None:
    """The newest attempt's error is reported."""
    trained = cloud.run
    stocked_out = "Resources are insufficient in region: us-central1."
    cloud.run = lambda google, job: google.end(job, "FAILED", stocked_out)
    assert f"cpu, repeat 1: exit code 1: {stocked_out}; run the same command" in command(
        "cpu", code=1
    )
    assert not Path("out/report.html").exists()  # no run produced anything
    cloud.run = trained
    command("cpu")
    first, second = cloud.jobs.values()
    assert output_of(first) == output_of(second)
    assert first["labels"] != second["labels"]
    assert rows()[0].state == "done"


def test_the_trainers_error_takes_precedence_over_the_exit_status(
    command: Command, cloud: Emulator
) -> None:
    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        put(plant("failed", [0.1, 0.1], state="failed", error="out of memory"), output_of(job))
        google.end(job, "FAILED", "The replica workerpool0-0 exited with a non-zero status of 2.")

    cloud.run = run
    expected = "cpu, repeat 1: exit code 2: out of memory; fix that, then run the command again ("
    assert expected in command("cpu", code=2)
    assert (
        "2 means its settings, data or machine were refused"
        in Path("out/cpu/repeat-1.log").read_text()
    )


def test_an_interrupted_comparison_finds_its_jobs_again(
    command: Command, cloud: Emulator, flying: FlyingClock, monkeypatch: Patch
) -> None:
    """And asks nothing about them, however much they cost: they are submitted."""
    trained = cloud.run
    resume = Event()
    killed = []

    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        resume.wait(60)
        trained(google, job)

    def terminate() -> None:
        if len(cloud.jobs) == 2 and not killed:
            killed.append(True)
            # does not wake the main thread
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    cloud.run = run
    flying.asleep = terminate
    shown = command("l4x1", "l4x2", code=75)
    for job in cloud.jobs.values():
        assert (
            f"{job['name']} is still running; cancel it: python -m deploy cancel {job['name']}"
            in shown
        )
    resume.set()
    monkeypatch.setattr("deploy.job.cost.UNCONFIRMED_TIMEOUT_USD", 0.0)
    command("l4x1", "l4x2")
    assert len(cloud.jobs) == 2
    assert [row.state for row in rows()] == ["done", "done"]


def test_a_partly_fetched_run_is_fetched_again_and_a_missing_result_is_reported(
    command: Command, cloud: Emulator
) -> None:
    job_dir = Path("out/cpu/repeat-1")
    (job_dir / "stats.jsonl" / "stats.jsonl").mkdir(parents=True)  # blocks the file
    command("cpu", code=1)
    assert not (job_dir / "result.json").exists()
    shutil.rmtree(job_dir / "stats.jsonl")
    command("cpu")
    assert len(cloud.jobs) == 1
    assert rows()[0].step_seconds is not None
    cloud.run = ends("SUCCEEDED")
    shutil.rmtree(Path("out"))
    assert re.search(
        r"cpu, repeat 1: gs://.* has no result.json, though the job succeeded",
        command("cpu", code=2),
    )
