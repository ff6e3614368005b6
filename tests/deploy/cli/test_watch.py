"""Tests watching, listing and cancelling of existing jobs."""

import time
from collections.abc import Callable

import pytest

from deploy.api.jobs import attach
from deploy.cli import jobs, submit
from deploy.job.ledger import Attempt, Submission
from deploy.platform.errors import JobUnknown, stocked_out
from deploy.platform.gcloud_and_sdk import Session
from deploy.platform.retries import RETRY_S
from deploy.platform.vertex_api import JobStatus
from tests.deploy.conftest import WHERE, Capture, FlyingClock, Job, error_of
from tests.deploy.emulator import RATE, Emulator, Fault
from tests.deploy.platform.test_backends import PARENT, SPEC

EXITED = "workerpool0-0 exited with a non-zero status of"
SDK = ["--backend=sdk", "--project=my-proj"]
Watched = Callable[..., tuple[str, str]]


@pytest.fixture
def watched(session: Session, job: Job, capsys: Capture) -> Watched:
    """Returns a function that watches the job, expects the exit `code`, and returns the output and
    the errors."""

    def run(code: int = 0) -> tuple[str, str]:
        assert jobs.run_watch([job["name"], *SDK], session) == code
        shown = capsys.readouterr()
        return shown.out, shown.err

    return run


def test_states_and_the_logs_of_all_workers_in_order_and_once(
    cloud: Emulator, watched: Watched, job: Job, flying: FlyingClock
) -> None:
    def late() -> None:
        """Logs an entry older than those already read, as a slow worker does."""
        cloud.log(job, "late", "workerpool1-0", time="2026-11-20T10:00:01.5Z")

    def times() -> None:
        job.update(
            startTime="2026-11-20T10:00:00Z",
            endTime="2026-11-20T10:30:00Z",
            state="JOB_STATE_SUCCEEDED",
        )

    steps: list[Callable[[], object]] = [
        lambda: cloud.begin(job),
        lambda: [
            cloud.log(job, f"step {n}", f"workerpool{n % 2}-0", f"2026-11-20T10:00:0{n}Z")
            for n in (1, 2, 0)
        ],
        late,
        lambda: cloud.log(job, "step 3", time="2026-11-20T10:00:03.000000001Z"),
        times,
        lambda: cloud.log(job, "the last words", time="2026-11-20T10:00:30Z"),
    ]
    flying.asleep = lambda: steps.pop(0)() if steps else None
    shown = watched()[0].splitlines()
    assert [line.split("  ", 1)[1] for line in shown[:-1]] == [
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
    assert shown[-1] == "SUCCEEDED after 0:30:00 on its machines, about 1.80 USD"


@pytest.mark.parametrize(
    ("state", "error", "code", "line"),
    [
        (
            "FAILED",
            f"The replica {EXITED} 137.",
            1,
            "137 means killed (SIGKILL), most often out of memory",
        ),
        (
            "FAILED",
            f"The replica {EXITED} 2.",
            2,
            "2 means its settings, data or machine were refused",
        ),
        ("FAILED", f"The replica {EXITED} 75.", 75, "with the same --job_dir to resume"),
        ("FAILED", "Internal error", 1, "error: Internal error"),
        ("CANCELLED", "", 75, ""),
        ("EXPIRED", "timed out", 75, "it ran for 1:00:00, the most that its plan, --max_cost or"),
    ],
)
def test_the_exit_code_of_a_job_that_ended(
    state: str, error: str, code: int, line: str, cloud: Emulator, watched: Watched, job: Job
) -> None:
    job["jobSpec"] = {**SPEC, "baseOutputDirectory": {"outputUriPrefix": "gs://bucket/demo"}}
    cloud.begin(job)
    cloud.end(job, state, error)
    shown, errors = watched(code)
    assert line in errors
    goes_on = "the same command with --job_dir=gs://bucket/demo"
    assert (goes_on in shown) == (code != 2)  # then the command itself has to change
    job["jobSpec"]["workerPoolSpecs"] = [
        {"containerSpec": {"args": ["--recipe=wgan_gp_digits", "--on_gpus"]}}
    ]
    assert "checkpoint" not in watched(code)[0]  # a check saves none


@pytest.mark.parametrize(
    ("kind", "message"),
    [(500, "x"), (503, "x"), (429, "Too many requests"), (429, RATE), ("cut", "")],
)
def test_ten_minutes_of_failures_are_survived(
    kind: int | str, message: str, cloud: Emulator, watched: Watched, job: Job, flying: FlyingClock
) -> None:
    began = flying.time
    cloud.faults = [Fault("customJobs|entries", kind, times=10**6, message=message)]
    flying.after(661, lambda: [cloud.faults.clear(), cloud.end(job, "SUCCEEDED")])
    (line,) = watched()[1].splitlines()
    assert len(cloud.requests) < 40  # backoff
    until = time.strftime("%H:%M", time.gmtime(began + RETRY_S))
    assert line.endswith(
        f" ({'no response' if kind == 'cut' else kind}): retrying until {until} UTC; Ctrl-C stops"
    )


@pytest.mark.parametrize(
    ("code", "fix"), [(401, "gcloud auth login"), (503, "the service fails: try again later")]
)
def test_a_job_of_unknown_state_has_not_failed(
    code: int, fix: str, cloud: Emulator, session: Session, job: Job, flying: FlyingClock
) -> None:
    """Covers an expired token, and a service that is down for more than half an hour."""
    flying.after(0, lambda: cloud.faults.append(Fault("customJobs", code, times=1000)))
    with pytest.raises(
        JobUnknown, match=f"{fix}.*the job may still be running; watch it: .* watch {job['name']}"
    ):
        jobs.run_watch([job["name"], *SDK], session)


def test_a_job_that_does_not_exist_is_not_reported_as_running(
    cloud: Emulator, session: Session
) -> None:
    error = error_of(jobs.run_watch, [f"{PARENT}/customJobs/7", *SDK], session)
    assert "not found: check --project=my-proj and --region=us-central1" in error
    assert "watch it" not in error


def test_the_logs_are_those_of_the_jobs_project(cloud: Emulator, session: Session) -> None:
    """gcloud's project differs, and the names that Vertex AI returns contain a project number
    instead of an ID."""
    where = [
        *WHERE,
        "--image=us-docker.pkg.dev/p/r/x:1",
        "--detach",
        "--backend=sdk",
        "--project=other-proj",
    ]
    assert (
        submit.main(["cpu", *where, "--model=mlp", "--data=digits", "--image_size=8"], session) == 0
    )
    (made,) = cloud.jobs.values()

    def project(job: str, given: str = "") -> str:
        return attach(job, given, "", "sdk", session).gcp.project

    assert [project(""), project(made["name"]), project("", "third-proj")] == [
        "other-proj",
        "other-proj",
        "third-proj",
    ]
    elsewhere = "locations/us-central1/customJobs/7"
    assert [project(f"projects/{name}/{elsewhere}") for name in ("named", "123")] == [
        "named",
        "my-proj",
    ]


def test_a_job_number_is_in_gclouds_region(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ai/region takes precedence over compute/region, as for `submit`."""
    for name, region in {"COMPUTE": "us-east1", "AI": "us-west1"}.items():
        monkeypatch.setenv(f"CLOUDSDK_{name}_REGION", region)
        assert (
            attach("1000", "my-proj", "", "sdk", session).name
            == f"projects/my-proj/locations/{region}/customJobs/1000"
        )


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        ([], ["line 0", "line 1", "line 2", "line 3", "now"]),
        (["--tail=2"], ["line 3", "now"]),
        (["--worker=1"], ["line 1", "line 3"]),
        (["--worker=workerpool0-0", "--tail=1"], ["now"]),
        (["--since=10m"], ["now"]),
    ],
)
def test_logs_are_printed_without_following(
    flags: list[str],
    texts: list[str],
    cloud: Emulator,
    session: Session,
    job: Job,
    flying: FlyingClock,
    capsys: Capture,
) -> None:
    cloud.begin(job)
    for number in (3, 1, 2, 0):
        cloud.log(
            job, f"line {number}", f"workerpool{number % 2}-0", time=f"2026-11-20T10:00:0{number}Z"
        )
    cloud.log(job, "now")
    assert jobs.run_logs([job["name"], *SDK, *flags], session) == 0
    assert [line.rpartition("  ")[2] for line in capsys.readouterr().out.splitlines()] == texts
    assert flying.slept == 0


def test_no_line_and_no_worker_are_said(session: Session, job: Job, capsys: Capture) -> None:
    assert jobs.run_logs([job["name"], *SDK, "--worker=3"], session) == 0
    assert "no lines in its log of that time or worker" in capsys.readouterr().err
    assert "worker=chief: 0 is the chief" in error_of(
        jobs.run_logs, [job["name"], *SDK, "--worker=chief"], session
    )


def test_the_last_logs_are_retried_for_half_a_minute(
    cloud: Emulator, watched: Watched, job: Job, flying: FlyingClock
) -> None:
    cloud.log(job, "the last words")
    cloud.end(job, "SUCCEEDED")
    cloud.faults = [Fault("entries", 503, times=3)]
    assert "the last words" in watched()[0]
    cloud.faults = [Fault("entries", 503, times=10**6)]
    began = flying.time
    assert "no logs: " in watched()[1]
    assert flying.time < began + 60


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "nothing was submitted from this folder"),
        (["1000"], "number or submission with --project and --region"),
        (["demo"], "is not recorded in this folder"),
    ],
)
def test_an_unknown_job_is_refused(arguments: list[str], line: str, session: Session) -> None:
    assert line in error_of(jobs.run_watch, [*arguments, "--backend=sdk"], session)


def test_jobs_are_those_of_gclouds_region_and_of_the_submissions_here_if_no_flag_names_one(
    cloud: Emulator, session: Session, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.delenv("CLOUDSDK_CORE_PROJECT")
    assert "project is missing: use --project=ID" in error_of(
        jobs.run_jobs, ["--backend=sdk"], session
    )
    assert "region is missing: use --region=us-central1" in error_of(jobs.run_jobs, SDK, session)
    Submission("s1", [Attempt("cpu", "my-proj", "us-east1", None, "gs://bucket/demo")]).write()
    for flags, region in (([], "us-east1"), (["--region=us-west1"], "us-west1")):
        assert jobs.run_jobs(["--backend=sdk", *flags], session) == 0
        assert capsys.readouterr().out == f"no jobs of this package in {region}\n"
    monkeypatch.setenv("CLOUDSDK_AI_REGION", "us-central1")
    assert jobs.run_jobs(["--backend=sdk"], session) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"no jobs of this package in {region}" for region in ("us-central1", "us-east1")
    ]


def test_cancel_asks_cancels_and_waits(
    cloud: Emulator, session: Session, job: Job, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    answers = ["y", "n"]
    cloud.begin(job)
    monkeypatch.setattr("builtins.input", answers.pop)
    assert "not cancelled" in error_of(jobs.run_cancel, [job["name"], *SDK], session)
    assert job["state"] == "JOB_STATE_RUNNING"
    assert capsys.readouterr().err.startswith("cancel demo (RUNNING, 0:00:0")
    assert jobs.run_cancel([job["name"], *SDK], session) == 0
    assert job["state"] == "JOB_STATE_CANCELLED"
    assert capsys.readouterr().out.endswith("CANCELLED\n")
    assert jobs.run_cancel([job["name"], *SDK], session) == 0  # already over: no question
    assert answers == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("Resources are insufficient in region: us-central1.", True),
        ("Job failed with STOCKOUT.", True),
        ("RESOURCE_EXHAUSTED: quota exceeded", True),
        ("The replica workerpool0-0 exited with a non-zero status of 1.", False),
        ("", False),
    ],
)
def test_failures_for_lack_of_machines(error: str, expected: bool) -> None:
    assert stocked_out(JobStatus("n", "d", "FAILED", 0.0, None, 1.0, error, {})) is expected
    assert not stocked_out(JobStatus("n", "d", "RUNNING", 0.0, 0.0, None, error, {}))
    assert not stocked_out(JobStatus("n", "d", "FAILED", 0.0, 0.5, 1.0, error, {})), (
        "it was paid for"
    )
