"""Tests watching, listing and cancelling of existing jobs."""

import re
import time
from collections.abc import Callable

import pytest

from deploy.api.jobs import attach
from deploy.job.ledger import Attempt, Submission
from deploy.platform.errors import STATE_UNKNOWN
from deploy.platform.retries import RETRY_S
from tests.deploy.conftest import BY_SDK, Command, FlyingClock, Job
from tests.deploy.emulator import RATE, Emulator, Fault
from tests.deploy.platform.test_backends import SPEC
from tests.fixtures import Patch

EXITED = "The replica workerpool0-0 exited with a non-zero status of"
MINE = ["--project=my-proj"]


def test_states_and_the_logs_of_all_workers_in_order_and_once(
    cloud: Emulator, typed: Command, job: Job, flying: FlyingClock
) -> None:
    def log(text: str, worker: int, second: str) -> None:
        cloud.log(job, text, f"workerpool{worker}-0", time=f"2026-11-20T10:00:{second}Z")

    def times() -> None:
        job["startTime"] = "2026-11-20T10:00:00Z"
        job["endTime"] = "2026-11-20T10:30:00Z"
        job["state"] = "JOB_STATE_SUCCEEDED"

    steps: list[Callable[[], object]] = [
        lambda: cloud.begin(job),
        lambda: [log(f"step {n}", n % 2, f"0{n}") for n in (1, 2, 0)],
        # older than those already read, as of a slow worker
        lambda: log("late", 1, "01.5"),
        lambda: log("step 3", 0, "03.000000001"),
        times,
        lambda: log("the last words", 0, "30"),
    ]
    flying.asleep = lambda: steps.pop(0)() if steps else None
    *shown, last = typed("watch", job["name"], *MINE).splitlines()
    assert [line.split("  ", 1)[1] for line in shown] == [
        "PENDING",
        "RUNNING",
        "workerpool0-0  step 0",
        "workerpool1-0  step 1",
        "workerpool0-0  step 2",
        "workerpool1-0  late",
        "workerpool0-0  step 3",
        "SUCCEEDED",
        "workerpool0-0  the last words",
    ]
    assert shown[2].startswith("10:00:00 UTC  ")
    assert last == "SUCCEEDED after 0:30:00 on its machines, about 1.80 USD"


@pytest.mark.parametrize(
    ("state", "error", "code", "line"),
    [
        ("FAILED", f"{EXITED} 137.", 1, "137 means killed (SIGKILL), most often out of memory"),
        ("FAILED", f"{EXITED} 2.", 2, "2 means its settings, data or machine were refused"),
        ("FAILED", f"{EXITED} 75.", 75, "with the same --job_dir to resume"),
        ("FAILED", "Internal error", 1, "error: Internal error"),
        ("CANCELLED", "", 75, ""),
        ("EXPIRED", "timed out", 75, "it ran for 1:00:00, the most that its plan, --max_cost or"),
    ],
)
def test_the_exit_code_of_a_job_that_ended(
    state: str, error: str, code: int, line: str, cloud: Emulator, typed: Command, job: Job
) -> None:
    job["jobSpec"] = {**SPEC, "baseOutputDirectory": {"outputUriPrefix": "gs://bucket/demo"}}
    cloud.begin(job)
    cloud.end(job, state, error)
    shown = typed("watch", job["name"], *MINE, code=code)
    assert line in shown
    goes_on = "the same command with --job_dir=gs://bucket/demo"
    assert (goes_on in shown) == (code != 2)  # then the command itself has to change
    args = ["--recipe=wgan_gp_digits", "--on_gpus"]
    job["jobSpec"]["workerPoolSpecs"] = [{"containerSpec": {"args": args}}]
    # a check saves none
    assert "checkpoint" not in typed("watch", job["name"], *MINE, code=code)


@pytest.mark.parametrize(
    ("kind", "message", "told"), [(503, "x", "503"), (429, RATE, "429"), ("cut", "", "no response")]
)
def test_ten_minutes_of_failures_are_survived(
    kind: int | str,
    message: str,
    told: str,
    cloud: Emulator,
    typed: Command,
    job: Job,
    flying: FlyingClock,
) -> None:
    until = time.strftime("%H:%M", time.gmtime(flying.time + RETRY_S))
    cloud.faults = [Fault("customJobs|entries", kind, times=10**6, message=message)]
    flying.after(661, lambda: [cloud.faults.clear(), cloud.end(job, "SUCCEEDED")])
    shown = typed("watch", job["name"], *MINE)
    assert len(cloud.requests) < 40  # backoff
    assert shown.endswith(f" ({told}): retrying until {until} UTC; Ctrl-C stops\n")
    assert shown.count("retrying") == 1


@pytest.mark.parametrize(
    ("code", "fix"), [(401, "gcloud auth login"), (503, "the service fails: try again later")]
)
def test_a_job_of_unknown_state_has_not_failed(
    code: int, fix: str, cloud: Emulator, typed: Command, job: Job, flying: FlyingClock
) -> None:
    """Covers an expired token, and a service that is down for more than half an hour."""
    flying.after(0, lambda: cloud.faults.append(Fault("customJobs", code, times=1000)))
    shown = typed("watch", job["name"], *MINE, code=STATE_UNKNOWN)
    line = f"{fix}.*the job may still be running; watch it: .* watch {job['name']}"
    assert re.search(line, shown)


def test_the_logs_are_those_of_the_jobs_project(cloud: Emulator, typed: Command) -> None:
    """gcloud's project differs, and the names that Vertex AI returns contain a project number
    instead of an ID."""
    typed("submit", "cpu", *BY_SDK, "--detach", "--project=other-proj")

    def project(job: str, given: str = "") -> str:
        return attach(job, given).gcp.project

    assert project("") == project(cloud.job["name"]) == "other-proj"
    assert project("", "third-proj") == "third-proj"
    assert project("projects/named/locations/us-central1/customJobs/7") == "named"
    assert project("projects/123/locations/us-central1/customJobs/7") == "my-proj"


def test_a_job_number_is_in_gclouds_region(cloud: Emulator, monkeypatch: Patch) -> None:
    """ai/region takes precedence over compute/region, as for `submit`."""
    for name, region in {"COMPUTE": "us-east1", "AI": "us-west1"}.items():
        monkeypatch.setenv(f"CLOUDSDK_{name}_REGION", region)
        assert (
            attach("1000", "my-proj").name == f"projects/my-proj/locations/{region}/customJobs/1000"
        )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "0 1 2 3 now"),
        (["--tail=2"], "3 now"),
        (["--worker=1"], "1 3"),
        (["--worker=workerpool0-0", "--tail=1"], "now"),
        (["--since=10m"], "now"),
    ],
)
def test_logs_are_printed_without_following(
    flags: list[str], words: str, cloud: Emulator, job: Job, flying: FlyingClock, typed: Command
) -> None:
    cloud.begin(job)
    for number in (3, 1, 2, 0):
        time = f"2026-11-20T10:00:0{number}Z"
        cloud.log(job, str(number), f"workerpool{number % 2}-0", time=time)
    cloud.log(job, "now")
    lines = typed("logs", job["name"], *MINE, *flags).splitlines()
    assert " ".join(line.split()[-1] for line in lines) == words
    assert flying.slept == 0


def test_no_line_and_no_worker_are_said(job: Job, refused: Command, typed: Command) -> None:
    assert "no lines in its log of that time or worker" in typed(
        "logs", job["name"], *MINE, "--worker=3"
    )
    assert "worker=chief: 0 is the chief" in refused("logs", job["name"], *MINE, "--worker=chief")


def test_the_last_logs_are_retried_for_half_a_minute(
    cloud: Emulator, typed: Command, job: Job, flying: FlyingClock
) -> None:
    cloud.log(job, "the last words")
    cloud.end(job, "SUCCEEDED")
    cloud.faults = [Fault("entries", 503, times=3)]
    assert "the last words" in typed("watch", job["name"], *MINE)
    cloud.faults = [Fault("entries", 503, times=10**6)]
    began = flying.time
    assert "no logs: " in typed("watch", job["name"], *MINE)
    assert flying.time < began + 60


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "nothing was submitted from this folder"),
        (["1000"], "number or submission with --project and --region"),
        (["demo"], "is not recorded in this folder"),
        (
            ["projects/my-proj/locations/us-central1/customJobs/7"],
            "not found: check --project=my-proj and --region=us-central1",
        ),
    ],
)
def test_an_unknown_job_is_refused(
    arguments: list[str], line: str, cloud: Emulator, refused: Command
) -> None:
    assert line in refused("watch", *arguments)


def test_jobs_are_those_of_gclouds_region_and_of_the_submissions_here_if_no_flag_names_one(
    cloud: Emulator, monkeypatch: Patch, refused: Command, typed: Command
) -> None:
    monkeypatch.delenv("CLOUDSDK_CORE_PROJECT")
    assert "project is missing: use --project=ID" in refused("jobs")
    assert "region is missing: use --region=us-central1" in refused("jobs", *MINE)
    Submission("s1", [Attempt("cpu", "my-proj", "us-east1", None, "gs://bucket/demo")]).write()
    for flags, region in (([], "us-east1"), (["--region=us-west1"], "us-west1")):
        assert typed("jobs", *flags) == f"no jobs of this package in {region}\n"
    monkeypatch.setenv("CLOUDSDK_AI_REGION", "us-central1")
    assert typed("jobs").splitlines() == [
        f"no jobs of this package in {region}" for region in ("us-central1", "us-east1")
    ]


def test_cancel_asks_cancels_and_waits(
    cloud: Emulator, job: Job, monkeypatch: Patch, typed: Command
) -> None:
    answers = ["y", "n"]
    cloud.begin(job)
    monkeypatch.setattr("builtins.input", answers.pop)
    shown = typed("cancel", job["name"], *MINE, code=2)
    assert shown.startswith("cancel demo (RUNNING, 0:00:0")
    assert "not cancelled" in shown
    assert job["state"] == "JOB_STATE_RUNNING"
    assert "CANCELLED\n" in typed("cancel", job["name"], *MINE)
    assert job["state"] == "JOB_STATE_CANCELLED"
    typed("cancel", job["name"], *MINE)  # already over: no question
    assert answers == []
