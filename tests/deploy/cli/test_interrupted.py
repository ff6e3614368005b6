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
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from deploy.__main__ import main
from deploy.job import sending
from deploy.platform.errors import STATE_UNKNOWN
from tests.deploy.cli.conftest import made
from tests.deploy.cli.test_lost_jobs import DUP, PLAIN, RECORD, SDK, SLOW, states
from tests.deploy.conftest import Command, FlyingClock, attempts, needs_gcloud, stand_in
from tests.deploy.emulator import PARENT, POSTS, QUOTA, Emulator, Fault, ends
from tests.fixtures import Json, Patch

CREATES = f"POST {PARENT}/customJobs"


def interrupts_itself() -> None:
    """Sends what Ctrl-C does, and lets it arrive."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)


def test_ctrl_c_after_a_lost_response_finds_the_job_and_the_same_command_follows_it(
    cloud: Emulator, flying: FlyingClock, typed: Command
) -> None:
    """The job is listed 20 seconds after the interrupt."""
    cloud.loses_a_job()

    def interrupt() -> None:
        flying.after(20, lambda: setattr(cloud, "lists_nothing", 0))
        flying.interrupt()

    flying.after(10, interrupt)
    shown = typed("submit", "cpu", *SDK, code=75)
    job = cloud.job
    assert "looks for it for up to 60 s; Ctrl-C skips that\n" in shown
    assert f"is running: watch it: python -m deploy watch {job['name']}" in shown
    assert attempts()[0]["state"] == "INTERRUPTED"
    assert attempts()[0]["job"] == job["name"]
    flying.asleep = lambda: cloud.end(job, "SUCCEEDED")
    assert f"continues with {job['name']}, which the same command submitted before" in typed(
        "submit", "cpu", *SDK
    )
    assert states(cloud) == ["SUCCEEDED"]
    assert attempts()[0]["state"] == "SUCCEEDED"
    cloud.run = ends("SUCCEEDED")
    typed("submit", "cpu", *SDK)
    assert len(cloud.jobs) == 2


@pytest.mark.parametrize(
    "find",
    [
        ["submit", "cpu", *SDK],
        ["watch", ""],
        ["cancel", "", "--yes"],
    ],
)
def test_a_job_that_appears_after_the_second_ctrl_c_is_found_by_its_label(
    find: list[str], cloud: Emulator, flying: FlyingClock, typed: Command
) -> None:
    cloud.loses_a_job()
    flying.asleep = flying.interrupt  # each time
    error = typed("submit", "cpu", *SDK, code=STATE_UNKNOWN)
    (submission,) = re.findall(
        r"not listed yet: `python -m deploy watch (\S+)` looks for it again, and so does the", error
    )
    flying.asleep = lambda: cloud.end(cloud.job, "SUCCEEDED")
    cloud.lists_nothing = 3
    typed(*(word or submission for word in find))
    assert attempts()[0]["job"] == cloud.job["name"]


@needs_gcloud
@pytest.mark.parametrize("connected", [True, False])
def test_what_gcloud_sent_is_read_from_its_log(
    connected: bool, cloud: Emulator, typed: Command, monkeypatch: Patch
) -> None:
    line = "Starting new HTTPS connection (1): host" if connected else "Running [gcloud.ai]"
    stand_in(f'echo "DEBUG: {line}" >&2\nsleep 0.3\nkill -INT {os.getpid()}\nsleep 30', monkeypatch)
    code = STATE_UNKNOWN if connected else 75
    typed("submit", "cpu", *SDK[:-1], "--backend=gcloud", code=code)
    assert attempts()[0]["state"] == ("INTERRUPTED" if connected else "NOT SUBMITTED")


@pytest.mark.parametrize(("code", "message"), [(400, "x"), (404, "x"), (429, QUOTA)])
def test_a_refusal_is_final_at_once_and_leaves_the_job_directory_free(
    code: int, message: str, cloud: Emulator, flying: FlyingClock, refused: Command, typed: Command
) -> None:
    cloud.faults = [Fault(POSTS, code, message=message)]
    error = refused(*DUP)
    assert ("no quota left" in error) == (code == 429)
    assert flying.slept == 0
    assert cloud.requests.count(CREATES) == 1
    assert RECORD not in cloud.objects
    typed(*DUP)


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
    flying: FlyingClock,
    typed: Command,
) -> None:
    cloud.faults = [Fault(POSTS, kind, after=True)]
    cloud.lists_nothing = listings
    typed("submit", "cpu", *PLAIN, f"--backend={backend}", "--detach")
    assert flying.slept == listings * sending.LOOK_S
    assert states(cloud) == ["PENDING"]
    assert cloud.requests.count(CREATES) == 1


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
    changed: Json, slept: float, cloud: Emulator, flying: FlyingClock, typed: Command
) -> None:
    reserved(cloud, flying.time - changed.pop("age", 0), **changed)
    typed(*DUP)
    assert flying.slept == pytest.approx(slept)
    assert json.loads(cloud.objects[RECORD])["submission"] != "s1"


@pytest.mark.parametrize("changed", [{"machine": "another"}, {"process": os.getpid()}])
def test_what_a_living_submission_reserved_is_not(
    changed: Json, cloud: Emulator, flying: FlyingClock, refused: Command
) -> None:
    reserved(cloud, flying.time - 100, **changed)
    error = refused(*DUP)
    assert (
        "began on desk, its last sign of life is 0:01:40 old, and its job is not listed yet: wait"
        in error
    )
    assert cloud.jobs == {}


def test_a_killed_submission_whose_job_is_listed_late_is_refused(
    cloud: Emulator, flying: FlyingClock, typed: Command
) -> None:
    reserved(cloud, flying.time, sending=True)
    flying.after(20, lambda: made(cloud, submission="s1"))
    assert "1000 (PENDING)" in typed("submit", "cpu", *SDK, "--name=dup", code=2)
    assert len(cloud.jobs) == 1


def test_a_laptop_that_slept_does_not_send(
    cloud: Emulator, flying: FlyingClock, typed: Command
) -> None:
    """Another machine took the directory between two requests."""
    cloud.faults = [Fault(POSTS, 503)]
    flying.after(
        30,
        lambda: (
            reserved(cloud, flying.time, submission="s2") or cloud.generations.update({RECORD: 9})
        ),
    )
    assert "gs://my-bucket/jobs/dup: another submission into it began meanwhile" in typed(
        "submit", "cpu", *SDK, "--name=dup", code=2
    )
    assert cloud.requests.count(CREATES) == 1
    assert cloud.jobs == {}
    assert json.loads(cloud.objects[RECORD])["submission"] == "s2"


# Of a signal that comes while a `with` ends, only the end of the process closes the file.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_ctrl_c_at_every_line_of_a_submission_makes_one_job(
    cloud: Emulator, monkeypatch: Patch, tmp_path: Path
) -> None:
    """A response is lost. The same command again follows the job or sends it; of one that was
    detached it says so."""
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
        sys.settrace(trace)
        main(DUP)
        sys.settrace(None)
        cloud.faults = []
        if left > 0:  # it has no more lines
            break
        main(DUP)
        assert len(cloud.jobs) == 1, number
    assert number > 100
