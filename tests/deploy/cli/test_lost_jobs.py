"""Tests submissions and watches in which the service lags, contradicts itself or is silent: no job
is lost track of."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import bill
from tests.deploy.cli.conftest import made
from tests.deploy.conftest import JOB, WHERE, Command, FlyingClock, Job, attempts, needs_gcloud
from tests.deploy.emulator import PARENT, POSTS, Emulator, Fault, ends
from tests.deploy.planted import content
from tests.fixtures import Json, Patch

PLAIN = [*WHERE, *JOB, "--image=us-docker.pkg.dev/p/r/x:1"]
SDK = [*PLAIN, "--backend=sdk"]
DUP = ["submit", "cpu", *SDK, "--name=dup", "--detach"]
WATCHED = ["--project=my-proj"]
EAST = ["--region=us-central1,us-east4", *SDK[1:]]
SLOW = [needs_gcloud, pytest.mark.slow]
RECORD = "my-bucket/jobs/dup/submission.json"


def states(cloud: Emulator) -> list[str]:
    return [job["state"].removeprefix("JOB_STATE_") for job in cloud.jobs.values()]


def test_the_search_outlasts_a_minute_and_ten_listings(
    cloud: Emulator, flying: FlyingClock, typed: Command
) -> None:
    cloud.loses_a_job()
    began = flying.time
    posted: list[tuple[float, int]] = []
    create = cloud.create

    def created(*arguments: Any) -> Json:
        posted.append((flying.time - began, cloud.requests.count(f"GET {PARENT}/customJobs")))
        return create(*arguments)

    cloud.create = created  # type: ignore[method-assign, assignment]
    shown = typed("submit", "cpu", *SDK, "--detach")
    _, (seconds, listings) = posted
    assert seconds >= 60
    assert listings >= 10
    assert shown.endswith("is cancelled as soon as `watch` or `jobs` sees it\n")
    assert shown.count("looks for the job by its label") >= 4, "every ten seconds"
    cloud.lists_nothing = 0
    typed("jobs", *WATCHED, "--region=us-central1")
    assert states(cloud) == ["PENDING", "CANCELLING"]


def test_a_double_that_is_listed_much_later_is_cancelled_while_the_first_is_followed(
    cloud: Emulator, flying: FlyingClock, typed: Command
) -> None:
    cloud.loses_a_job()

    def appear() -> None:
        cloud.lists_nothing = 0
        for number in ("1000", "1001"):
            cloud.begin(cloud.jobs[number])
        flying.after(400, lambda: cloud.end(cloud.jobs["1000"], "SUCCEEDED"))

    flying.after(200, appear)
    typed("submit", "cpu", *SDK)
    assert states(cloud) == ["SUCCEEDED", "CANCELLING"]
    assert attempts()[0]["job"] == cloud.jobs["1000"]["name"]


@pytest.mark.parametrize("words", [["watch"], ["cancel", "--yes"]])
def test_whoever_looks_later_ends_the_double(
    words: list[str], cloud: Emulator, job: Job, typed: Command
) -> None:
    double = made(cloud, submission="s1")
    stranger = made(cloud, submission="s2")
    cloud.begin(double)
    if words == ["watch"]:
        cloud.end(job, "SUCCEEDED")
    typed(*words, job["name"], *WATCHED)
    assert double["state"] == "JOB_STATE_CANCELLING"
    assert stranger["state"] == "JOB_STATE_PENDING"


def test_a_command_that_was_pasted_again_makes_no_double(
    cloud: Emulator, job: Job, typed: Command
) -> None:
    """It has the label of the first job, which was over before."""
    cloud.begin(job)
    cloud.end(job, "FAILED")
    again = made(cloud, submission="s1")
    typed("jobs", *WATCHED, "--region=us-central1")
    typed("cancel", job["name"], *WATCHED)
    # that of the first, not of the second
    typed("watch", job["name"], *WATCHED, code=1)
    assert again["state"] == "JOB_STATE_PENDING"


def test_two_running_jobs_never_share_a_job_directory(
    cloud: Emulator, tmp_path: Path, monkeypatch: Patch, refused: Command, typed: Command
) -> None:
    """Also from another folder, as on another machine, and into another region; once the first is
    over it is free."""
    typed(*DUP)
    first = cloud.job
    monkeypatch.chdir(tmp_path)
    elsewhere = [word.replace("us-central1", "us-east1") for word in DUP]
    taken = f"gs://my-bucket/jobs/dup: a job writes to it already: {first['name']}"
    for again in (DUP, elsewhere):
        assert taken in refused(*again)
    assert len(cloud.jobs) == 1
    cloud.end(first, "FAILED")
    typed(*elsewhere)
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
    fault: Fault, line: str, cloud: Emulator, typed: Command
) -> None:
    cloud.faults = [fault]
    assert line in typed(*DUP)
    assert len(cloud.jobs) == 1


def test_a_damaged_record_is_named(cloud: Emulator, refused: Command) -> None:
    cloud.objects[RECORD] = b"[]"
    assert f"gs://{RECORD} is damaged: remove it" in refused(*DUP)
    assert cloud.jobs == {}


@pytest.mark.parametrize(("kind", "poll"), [("html", "html"), ("empty", "empty"), ("html", 404)])
def test_an_answer_that_is_none_is_a_lost_answer_and_a_404_on_the_first_poll_no_end(
    kind: str, poll: int | str, cloud: Emulator, typed: Command
) -> None:
    cloud.run = ends("SUCCEEDED")
    cloud.faults = [Fault(POSTS, kind, after=True), Fault("GET .*/customJobs/", poll, times=2)]
    typed("submit", "cpu", *SDK)
    assert states(cloud) == ["SUCCEEDED"]
    assert cloud.requests.count(f"POST {PARENT}/customJobs") == 1


def test_a_job_that_waits_too_long_is_cancelled_and_the_next_tried(
    cloud: Emulator, flying: FlyingClock, typed: Command
) -> None:
    def run(google: Emulator, job: Job) -> None:
        if "us-east4" in job["name"]:
            ends("SUCCEEDED")(google, job)

    cloud.run = run
    began = flying.time
    shown = typed("submit", "l4x1", *EAST, "--max_wait=11m")
    assert states(cloud) == ["CANCELLED", "SUCCEEDED"]
    assert [attempt["state"] for attempt in attempts()] == ["EXPIRED", "SUCCEEDED"]
    assert 660 <= flying.time - began < 760
    assert "no machines within --max_wait=0:11:00: cancelled\ntries the next" in shown
    assert shown.count("PENDING for ") == 2


@pytest.mark.parametrize(
    "message",
    [
        "Machine type g2-standard-24 is not supported in region us-central1.",
        "The accelerator NVIDIA_L4 is not available in the location us-central1",
        'machineSpec.machineType: machine type "g2-standard-24" does not exist in us-central1',
    ],
)
def test_a_region_without_such_machines_is_passed_over(
    message: str, cloud: Emulator, typed: Command
) -> None:
    cloud.run = ends("SUCCEEDED")
    cloud.faults = [Fault(POSTS.replace("[^/]+", "us-central1"), 400, message=message)]
    typed("submit", "l4x2", *EAST)
    assert [attempt["state"] for attempt in attempts()] == ["NOT SUBMITTED", "SUCCEEDED"]


def test_sigterm_answers_as_ctrl_c(job: Job, flying: FlyingClock, typed: Command) -> None:
    before = signal.getsignal(signal.SIGTERM)
    flying.asleep = lambda: os.kill(os.getpid(), signal.SIGTERM)
    shown = typed("watch", job["name"], "--project=my-proj", code=75)
    assert f"and not cancelled; watch it: python -m deploy watch {job['name']}" in shown
    assert signal.getsignal(signal.SIGTERM) == before
    assert job["state"] == "JOB_STATE_PENDING"


@pytest.fixture(autouse=True)
def _billed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(bill, "billed_usd", lambda table, labels: dict.fromkeys(labels, 0.5))


def test_a_second_attempt_is_billed_by_its_own_label_from_another_folder_too(
    cloud: Emulator, typed: Command
) -> None:
    """The first one was in another region."""
    job = made(cloud, submission="s-2")
    words = ["--table=p.d.gcp_billing_export_v1_0A", *WATCHED, "--json"]
    (billed,) = json.loads(typed("bill", job["name"], *words))["jobs"]
    assert billed["submission"] == "s-2"
    assert billed["job"] == job["name"]


@pytest.mark.parametrize("kind", ["submission", "display name", "number", "name"])
def test_a_job_is_found_from_another_folder_by_any_of_its_names(
    cloud: Emulator, tmp_path: Path, monkeypatch: Patch, kind: str, refused: Command, typed: Command
) -> None:
    """The index there is made from the job's label and the record in its job directory; the same
    command follows it."""
    typed("submit", "cpu", *SDK, "--detach")
    (file,) = Path("runs/submitted").glob("*.json")
    monkeypatch.chdir(tmp_path)
    job = cloud.job
    names = {"submission": file.stem, "display name": job["displayName"], "number": "1000"}
    name = names.get(kind, job["name"])
    ends("SUCCEEDED")(cloud, job)
    regions = ["--region=us-east1,us-central1"]
    typed("watch", name, *regions)
    shown = typed("bill", name, "--table=p.d.gcp_billing_export_v1_0A", *regions)
    (attempt,) = attempts()
    assert f"{job['name']} (cpu): estimated" in shown
    assert attempt["job"] == job["name"]
    assert attempt["tier"] == "cpu"
    assert attempt["state"] == "SUCCEEDED"
    assert content(next(Path("runs/submitted").glob("*.json")))["detached"]
    error = refused("watch", "another", *regions)
    assert "job 'another': neither this folder nor us-east1, us-central1 has it: give" in error
