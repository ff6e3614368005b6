"""Tests submissions and watches in which the service lags, contradicts itself or is silent: no job
is lost track of."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import bill, jobs, submit
from deploy.platform.gcloud_and_sdk import Session
from tests.deploy.conftest import (
    JOB,
    WHERE,
    Capture,
    FlyingClock,
    Job,
    attempts,
    error_of,
    needs_gcloud,
)
from tests.deploy.emulator import PARENT, POSTS, Emulator, Fault, ends
from tests.deploy.platform.test_backends import SPEC

PLAIN = [*WHERE, *JOB, "--image=us-docker.pkg.dev/p/r/x:1"]
SDK = [*PLAIN, "--backend=sdk"]
EAST = ["--region=us-central1,us-east4", *SDK[1:]]
SLOW = [needs_gcloud, pytest.mark.slow]
RECORD = "my-bucket/jobs/dup/submission.json"


def states(cloud: Emulator) -> list[str]:
    return [job["state"].removeprefix("JOB_STATE_") for job in cloud.jobs.values()]


def test_the_search_outlasts_a_minute_and_ten_listings(
    cloud: Emulator, session: Session, flying: FlyingClock, capsys: Capture
) -> None:
    cloud.faults = [Fault(POSTS, 503, after=True)]
    cloud.lists_nothing = 10**6
    began = flying.time
    posted: list[tuple[float, int]] = []
    create = cloud.create

    def created(*arguments: Any) -> dict[str, Any]:
        posted.append((flying.time - began, cloud.requests.count(f"GET {PARENT}/customJobs")))
        return create(*arguments)

    cloud.create = created  # type: ignore[method-assign, assignment]
    assert submit.main(["cpu", *SDK, "--detach"], session) == 0
    _, (seconds, listings) = posted
    assert seconds >= 60
    assert listings >= 10
    shown = capsys.readouterr()
    assert (
        shown.err.splitlines()[-1]
        == "warning: a response was lost: a second job is cancelled as soon as `watch` or `jobs`"
        " sees it"
    )
    told = [
        line for line in shown.err.splitlines() if line.startswith("looks for the job by its label")
    ]
    assert len(told) >= 4, "every ten seconds"
    cloud.lists_nothing = 0
    assert (
        jobs.run_jobs(["--backend=sdk", "--project=my-proj", "--region=us-central1"], session) == 0
    )
    assert states(cloud) == ["PENDING", "CANCELLING"]


def test_a_double_that_is_listed_much_later_is_cancelled_while_the_first_is_followed(
    cloud: Emulator, session: Session, flying: FlyingClock
) -> None:
    cloud.faults = [Fault(POSTS, 503, after=True)]
    cloud.lists_nothing = 10**6

    def appear() -> None:
        cloud.lists_nothing = 0
        for number in ("1000", "1001"):
            cloud.begin(cloud.jobs[number])
        flying.after(400, lambda: cloud.end(cloud.jobs["1000"], "SUCCEEDED"))

    flying.after(200, appear)
    assert submit.main(["cpu", *SDK], session) == 0
    assert states(cloud) == ["SUCCEEDED", "CANCELLING"]
    assert attempts()[0]["job"] == cloud.jobs["1000"]["name"]


@pytest.mark.parametrize(("verb", "more"), [(jobs.run_watch, []), (jobs.run_cancel, ["--yes"])])
def test_whoever_looks_later_ends_the_double(
    verb: Any, more: list[str], cloud: Emulator, session: Session, job: Job
) -> None:
    double = cloud.create(
        PARENT, {"displayName": "demo", "jobSpec": SPEC, "labels": {"submission": "s1"}}
    )
    stranger = cloud.create(
        PARENT, {"displayName": "demo", "jobSpec": SPEC, "labels": {"submission": "s2"}}
    )
    cloud.begin(double)
    if verb is jobs.run_watch:
        cloud.end(job, "SUCCEEDED")
    assert verb([job["name"], "--backend=sdk", "--project=my-proj", *more], session) == 0
    assert (double["state"], stranger["state"]) == ("JOB_STATE_CANCELLING", "JOB_STATE_PENDING")


def test_a_command_that_was_pasted_again_makes_no_double(
    cloud: Emulator, session: Session, job: Job
) -> None:
    """It has the label of the first job, which was over before."""
    where = ["--backend=sdk", "--project=my-proj"]
    cloud.begin(job)
    cloud.end(job, "FAILED")
    again = cloud.create(
        PARENT, {"displayName": "demo", "jobSpec": SPEC, "labels": {"submission": "s1"}}
    )
    assert jobs.run_jobs([*where, "--region=us-central1"], session) == 0
    assert jobs.run_cancel([job["name"], *where], session) == 0
    # that of the first, not of the second
    assert jobs.run_watch([job["name"], *where], session) == 1
    assert again["state"] == "JOB_STATE_PENDING"


@pytest.mark.parametrize("backend", [pytest.param("gcloud", marks=SLOW), "sdk"])
def test_two_running_jobs_never_share_a_job_directory(
    backend: str, cloud: Emulator, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from another folder, as on another machine, and into another region; once the first is
    over it is free."""
    command = ["cpu", *PLAIN, f"--backend={backend}", "--name=dup", "--detach"]
    assert submit.main(command, session) == 0
    (first,) = cloud.jobs.values()
    monkeypatch.chdir(tmp_path)
    elsewhere = [argument.replace("us-central1", "us-east1") for argument in command]
    for again in (command, elsewhere):
        error = error_of(submit.main, again, session)
        assert f"gs://my-bucket/jobs/dup: a job writes to it already: {first['name']}" in error
    assert len(cloud.jobs) == 1
    cloud.end(first, "FAILED")
    assert submit.main(elsewhere, session) == 0
    assert json.loads(cloud.objects[RECORD])["region"] == "us-east1"


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (Fault("POST .*upload.*/o$", 503, after=True), ""),
        (
            Fault("POST .*upload.*/o$", 403, times=9),
            "make sure that no other job writes to gs://my-bucket/jobs/dup",
        ),
    ],
)
def test_the_record_survives_a_lost_response_and_is_no_obstacle(
    fault: Fault, line: str, cloud: Emulator, session: Session, capsys: Capture
) -> None:
    cloud.faults = [fault]
    assert submit.main(["cpu", *SDK, "--name=dup", "--detach"], session) == 0
    assert line in capsys.readouterr().err
    assert len(cloud.jobs) == 1


def test_a_damaged_record_is_named(cloud: Emulator, session: Session) -> None:
    cloud.objects[RECORD] = b"[]"
    assert f"gs://{RECORD} is damaged: remove it" in error_of(
        submit.main, ["cpu", *SDK, "--name=dup", "--detach"], session
    )
    assert cloud.jobs == {}


@pytest.mark.parametrize(
    ("kind", "poll", "backend"),
    [
        ("html", "html", "sdk"),
        ("empty", "empty", "sdk"),
        ("html", 404, "sdk"),
        pytest.param("html", "html", "gcloud", marks=SLOW),
    ],
)
def test_an_answer_that_is_none_is_a_lost_answer_and_a_404_on_the_first_poll_no_end(
    kind: str, poll: int | str, backend: str, cloud: Emulator, session: Session
) -> None:
    cloud.run = ends("SUCCEEDED")
    cloud.faults = [Fault(POSTS, kind, after=True), Fault("GET .*/customJobs/", poll, times=2)]
    assert submit.main(["cpu", *PLAIN, f"--backend={backend}"], session) == 0
    assert (states(cloud), cloud.requests.count(f"POST {PARENT}/customJobs")) == (["SUCCEEDED"], 1)


def test_a_job_that_waits_too_long_is_cancelled_and_the_next_tried(
    cloud: Emulator, session: Session, flying: FlyingClock, capsys: Capture
) -> None:
    def run(google: Emulator, job: Job) -> None:
        if "us-east4" in job["name"]:
            ends("SUCCEEDED")(google, job)

    cloud.run = run
    began = flying.time
    assert submit.main(["l4x1", *EAST, "--max_wait=11m"], session) == 0
    assert states(cloud) == ["CANCELLED", "SUCCEEDED"]
    assert [attempt["state"] for attempt in attempts()] == ["EXPIRED", "SUCCEEDED"]
    assert 660 <= flying.time - began < 760
    shown = capsys.readouterr().out
    assert "no machines within --max_wait=0:11:00: cancelled\ntries the next" in shown
    assert shown.count("PENDING for ") == 2


NOT_SUPPORTED = "Machine type g2-standard-24 is not supported in region us-central1."


@pytest.mark.parametrize(
    ("message", "backend"),
    [
        (NOT_SUPPORTED, "sdk"),
        pytest.param(NOT_SUPPORTED, "gcloud", marks=SLOW),
        ("The accelerator NVIDIA_L4 is not available in the location us-central1", "sdk"),
        (
            (
                'machineSpec.machineType: machine type "g2-standard-24" does not exist in'
                " us-central1: not found"
            ),
            "sdk",
        ),
    ],
)
def test_a_region_without_such_machines_is_passed_over(
    message: str, backend: str, cloud: Emulator, session: Session
) -> None:
    cloud.run = ends("SUCCEEDED")
    cloud.faults = [Fault(POSTS.replace("[^/]+", "us-central1"), 400, message=message)]
    assert submit.main(["l4x2", *EAST[:-1], f"--backend={backend}"], session) == 0
    assert [attempt["state"] for attempt in attempts()] == ["NOT SUBMITTED", "SUCCEEDED"]


@pytest.mark.parametrize("backend", [pytest.param("gcloud", marks=needs_gcloud), "sdk"])
def test_sigterm_answers_as_ctrl_c(
    backend: str, cloud: Emulator, session: Session, job: Job, flying: FlyingClock, capsys: Capture
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    flying.asleep = lambda: os.kill(os.getpid(), signal.SIGTERM)
    assert jobs.run_watch([job["name"], f"--backend={backend}", "--project=my-proj"], session) == 75
    assert (
        f"no longer watched, and not cancelled; watch it: python -m deploy watch {job['name']}"
        in capsys.readouterr().out
    )
    assert (signal.getsignal(signal.SIGTERM), job["state"]) == (before, "JOB_STATE_PENDING")


def test_a_second_attempt_is_billed_by_its_own_label_from_another_folder_too(
    cloud: Emulator, session: Session, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The first one was in another region."""
    job = cloud.create(
        PARENT, {"displayName": "demo", "jobSpec": SPEC, "labels": {"submission": "s-2"}}
    )
    monkeypatch.setattr(bill, "billed_usd", lambda table, labels, clock: dict.fromkeys(labels, 0.5))
    words = [
        job["name"],
        "--table=p.d.gcp_billing_export_v1_0A",
        "--backend=sdk",
        "--project=my-proj",
        "--json",
    ]
    assert bill.main(words, session) == 0
    (billed,) = json.loads(capsys.readouterr().out.splitlines()[-1])["jobs"]
    assert (billed["submission"], billed["job"]) == ("s-2", job["name"])


@pytest.mark.parametrize("kind", ["submission", "display name", "number", "name"])
def test_a_job_is_found_from_another_folder_by_any_of_its_names(
    cloud: Emulator,
    session: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    capsys: Capture,
) -> None:
    """The index there is made from the job's label and the record in its job directory; the same
    command follows it."""
    assert submit.main(["cpu", *SDK, "--detach"], session) == 0
    (before,) = attempts()
    (file,) = Path("runs/submitted").glob("*.json")
    monkeypatch.chdir(tmp_path)
    (job,) = cloud.jobs.values()
    name = {
        "submission": file.stem,
        "display name": job["displayName"],
        "number": job["name"].rpartition("/")[2],
        "name": job["name"],
    }[kind]
    ends("SUCCEEDED")(cloud, job)
    regions = ["--backend=sdk", "--region=us-east1,us-central1"]
    assert jobs.run_watch([name, *regions], session) == 0
    monkeypatch.setattr(bill, "billed_usd", lambda table, labels, clock: dict.fromkeys(labels, 0.5))
    capsys.readouterr()
    assert bill.main([name, "--table=p.d.gcp_billing_export_v1_0A", *regions], session) == 0
    assert f"{before['job']} (cpu): estimated" in capsys.readouterr().out
    (after_it,) = attempts()
    assert (after_it["job"], after_it["tier"], after_it["state"]) == (
        before["job"],
        "cpu",
        "SUCCEEDED",
    )
    assert json.loads(next(Path("runs/submitted").glob("*.json")).read_text())["detached"]
    assert (
        "job 'another': neither this folder nor us-east1, us-central1 has it: give its name,"
        " display name" in error_of(jobs.run_watch, ["another", *regions], session)
    )
