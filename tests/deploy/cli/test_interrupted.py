"""Tests submissions that are interrupted or killed: no job is lost or doubled, no job directory
stays locked."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from deploy.cli import jobs, submit
from deploy.job import sending
from deploy.platform.errors import STATE_UNKNOWN, JobUnknown
from deploy.platform.gcloud_and_sdk import Session
from tests.deploy.cli.test_lost_jobs import PLAIN, RECORD, SDK, SLOW, states
from tests.deploy.conftest import Capture, FlyingClock, attempts, error_of, needs_gcloud, stand_in
from tests.deploy.emulator import PARENT, POSTS, QUOTA, Emulator, Fault, ends
from trainer.base.errors import UserError

CREATES = f"POST {PARENT}/customJobs"


def exits(code: int, arguments: list[str], session: Session) -> str:
    with pytest.raises(KeyboardInterrupt if code == 75 else JobUnknown) as caught:
        submit.main(arguments, session)
    return str(caught.value)


def interrupts_itself() -> None:
    """Sends what Ctrl-C does, and lets it arrive."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)


def test_ctrl_c_after_a_lost_response_finds_the_job_and_the_same_command_follows_it(
    cloud: Emulator, session: Session, flying: FlyingClock, capsys: Capture
) -> None:
    """The job is listed 20 seconds after the interrupt."""
    cloud.faults = [Fault(POSTS, 503, after=True)]
    cloud.lists_nothing = 10**6

    def interrupt() -> None:
        flying.after(20, lambda: setattr(cloud, "lists_nothing", 0))
        flying.interrupt()

    flying.after(10, interrupt)
    told = exits(75, ["cpu", *SDK], session)
    (job,) = cloud.jobs.values()
    assert told == job["name"]
    shown = capsys.readouterr().err
    assert (
        "stopped while the job is created: looks for it for up to 60 s; Ctrl-C skips that\n"
        in shown
    )
    assert (
        f"{job['name']} was created and goes on: watch it: python -m deploy watch {job['name']}"
        in shown
    )
    assert (attempts()[0]["state"], attempts()[0]["job"]) == ("INTERRUPTED", job["name"])
    flying.asleep = lambda: cloud.end(job, "SUCCEEDED")
    assert submit.main(["cpu", *SDK], session) == 0
    assert (
        f"goes on with {job['name']}, which the same command submitted before"
        in capsys.readouterr().out
    )
    assert (states(cloud), attempts()[0]["state"]) == (["SUCCEEDED"], "SUCCEEDED")
    cloud.run = ends("SUCCEEDED")
    assert submit.main(["cpu", *SDK], session) == 0, "it is over: the same command makes another"
    assert len(cloud.jobs) == 2


@pytest.mark.parametrize(
    "find",
    [
        lambda submission, session: submit.main(["cpu", *SDK], session),
        lambda submission, session: jobs.run_watch([submission, "--backend=sdk"], session),
        lambda submission, session: jobs.run_cancel(
            [submission, "--backend=sdk", "--yes"], session
        ),
    ],
    ids=["submit", "watch", "cancel"],
)
def test_a_job_that_appears_after_the_second_ctrl_c_is_found_by_its_label(
    find: Callable[[str, Session], int],
    cloud: Emulator,
    session: Session,
    flying: FlyingClock,
    capsys: Capture,
) -> None:
    cloud.faults = [Fault(POSTS, 503, after=True)]
    cloud.lists_nothing = 10**6
    flying.asleep = flying.interrupt  # each time
    error = exits(STATE_UNKNOWN, ["cpu", *SDK], session)
    capsys.readouterr()
    (submission,) = re.findall(
        r"not listed yet: `python -m deploy watch (\S+)` looks for it again, and so does the", error
    )
    (job,) = cloud.jobs.values()
    flying.asleep = lambda: cloud.end(job, "SUCCEEDED")
    cloud.lists_nothing = 3
    assert find(submission, session) == 0
    assert (len(cloud.jobs), attempts()[0]["job"]) == (1, job["name"])


def test_a_name_that_is_known_survives_ctrl_c(
    cloud: Emulator, session: Session, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """It arrives between the response and its record, after a first response was lost."""
    cloud.faults = [Fault(POSTS, 503)]
    monkeypatch.setattr(
        sending, "tell", lambda line: interrupts_itself() if "a response was lost" in line else None
    )
    exits(75, ["cpu", *SDK], session)
    (job,) = cloud.jobs.values()
    assert attempts()[0]["job"] == job["name"]
    assert "looks for it" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "where", ["GET .*submission.json", "POST .*/upload/.*"], ids=["reading", "reserving"]
)
def test_ctrl_c_before_any_request_leaves_nothing(
    where: str, cloud: Emulator, session: Session
) -> None:
    """Nobody looks for a job that was never requested, and its directory is free."""
    cloud.faults = [Fault(where, 503, after=True, action=interrupts_itself)]
    with pytest.raises(KeyboardInterrupt):
        submit.main(["cpu", *SDK, "--name=dup"], session)
    assert attempts()[0]["state"] == "NOT SUBMITTED"
    assert not any("customJobs" in request for request in cloud.requests)
    cloud.run = ends("SUCCEEDED")
    assert submit.main(["cpu", *SDK, "--name=dup"], session) == 0


@needs_gcloud
@pytest.mark.parametrize("connected", [True, False], ids=["sent", "not yet"])
def test_what_gcloud_sent_is_read_from_its_log(
    connected: bool,
    cloud: Emulator,
    session: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = (
        "DEBUG: Starting new HTTPS connection (1): host"
        if connected
        else "DEBUG: Running [gcloud.ai]"
    )
    stand_in(
        tmp_path, f'echo "{line}" >&2\nsleep 0.3\nkill -INT {os.getpid()}\nsleep 30', monkeypatch
    )
    with pytest.raises(JobUnknown if connected else KeyboardInterrupt):
        submit.main(["cpu", *SDK[:-1], "--backend=gcloud"], session)
    assert attempts()[0]["state"] == ("INTERRUPTED" if connected else "NOT SUBMITTED")


@pytest.mark.parametrize(("code", "message"), [(400, "x"), (403, "x"), (404, "x"), (429, QUOTA)])
def test_a_refusal_is_final_at_once_and_leaves_the_job_directory_free(
    code: int, message: str, cloud: Emulator, session: Session, flying: FlyingClock
) -> None:
    cloud.faults = [Fault(POSTS, code, message=message)]
    error = error_of(submit.main, ["cpu", *SDK, "--name=dup", "--detach"], session)
    assert ("no quota left" in error) == (code == 429)
    assert (flying.slept, cloud.requests.count(CREATES), RECORD in cloud.objects) == (0, 1, False)
    assert submit.main(["cpu", *SDK, "--name=dup", "--detach"], session) == 0


@pytest.mark.parametrize(
    ("kind", "listings", "backend"),
    [
        (500, 4, "sdk"),
        ("cut", 2, "sdk"),
        ("html", 9, "sdk"),
        pytest.param(503, 2, "gcloud", marks=SLOW),
    ],
)
def test_a_list_that_lags_makes_no_second_job_and_the_name_is_told_as_soon_as_it_is_listed(
    kind: int | str,
    listings: int,
    backend: str,
    cloud: Emulator,
    session: Session,
    flying: FlyingClock,
) -> None:
    cloud.faults = [Fault(POSTS, kind, after=True)]
    cloud.lists_nothing = listings
    assert submit.main(["cpu", *PLAIN, f"--backend={backend}", "--detach"], session) == 0
    assert (flying.slept, states(cloud), cloud.requests.count(CREATES)) == (
        listings * sending.LOOK_S,
        ["PENDING"],
        1,
    )


def reserved(cloud: Emulator, now: float, **changed: Any) -> None:
    """Puts the record of a submission whose process has ended on this machine."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    about = {
        "submission": "s1",
        "project": "my-proj",
        "region": "us-central1",
        "host": "desk",
        "time": now,
        "machine": sending._machine(),
        "process": done.pid,
        "sending": False,
    }
    cloud.objects[RECORD] = json.dumps({**about, **changed}).encode()


@pytest.mark.parametrize(
    ("changed", "slept"),
    [
        ({}, 0.0),  # killed before it sent anything
        ({"sending": True}, 60.0),  # a request may have been sent: its job is looked for
        ({"machine": "another", "age": 301}, 0.0),
    ],
)
def test_what_a_killed_submission_reserved_is_taken_over(
    changed: dict[str, Any], slept: float, cloud: Emulator, session: Session, flying: FlyingClock
) -> None:
    reserved(cloud, flying.time - changed.pop("age", 0), **changed)
    assert submit.main(["cpu", *SDK, "--name=dup", "--detach"], session) == 0
    assert flying.slept == pytest.approx(slept)
    assert json.loads(cloud.objects[RECORD])["submission"] != "s1"


@pytest.mark.parametrize(
    "changed", [{"machine": "another"}, {"process": os.getpid()}], ids=["elsewhere", "alive"]
)
def test_what_a_living_submission_reserved_is_not(
    changed: dict[str, Any], cloud: Emulator, session: Session, flying: FlyingClock
) -> None:
    reserved(cloud, flying.time - 100, **changed)
    error = error_of(submit.main, ["cpu", *SDK, "--name=dup", "--detach"], session)
    assert (
        "began on desk, its last sign of life is 0:01:40 old, and its job is not listed yet: wait"
        " 0:03:20, or" in error
    )
    assert cloud.jobs == {}


def test_a_killed_submission_whose_job_is_listed_late_is_refused(
    cloud: Emulator, session: Session, flying: FlyingClock
) -> None:
    reserved(cloud, flying.time, sending=True)
    flying.after(
        20,
        lambda: cloud.create(
            PARENT, {"displayName": "x", "jobSpec": {}, "labels": {"submission": "s1"}}
        ),
    )
    with pytest.raises(UserError, match=r"a job writes to it already: .*1000 \(PENDING\)"):
        submit.main(["cpu", *SDK, "--name=dup"], session)
    assert len(cloud.jobs) == 1


def test_a_laptop_that_slept_does_not_send(
    cloud: Emulator, session: Session, flying: FlyingClock
) -> None:
    """Another machine took the directory between two requests."""
    cloud.faults = [Fault(POSTS, 503)]
    flying.after(
        30,
        lambda: (
            reserved(cloud, flying.time, submission="s2") or cloud.generations.update({RECORD: 9})
        ),
    )
    assert "gs://my-bucket/jobs/dup: another submission into it began meanwhile" in error_of(
        submit.main, ["cpu", *SDK, "--name=dup"], session
    )
    assert (cloud.requests.count(CREATES), cloud.jobs) == (1, {})
    assert json.loads(cloud.objects[RECORD])["submission"] == "s2"


# Of a signal that comes while a `with` ends, only the end of the process closes the file.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_ctrl_c_at_every_line_of_a_submission_makes_one_job(
    cloud: Emulator, session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A response is lost. The same command again follows the job or sends it; of one that was
    detached it says so."""
    command = ["cpu", *SDK, "--detach", "--name=dup"]
    left = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(
            ("job/fallback.py", "job/ledger.py", "job/sending.py")
        ):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    for number in itertools.count(1):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        cloud.jobs = {}
        cloud.objects = {}
        left = number
        cloud.faults = [Fault(POSTS, 503, after=True)]
        with suppress(KeyboardInterrupt):
            sys.settrace(trace)
            submit.main(command, session)
        sys.settrace(None)
        cloud.faults = []
        if left > 0:  # it has no more lines
            break
        with suppress(UserError):
            submit.main(command, session)
        assert len(cloud.jobs) == 1, number
    assert number > 100
