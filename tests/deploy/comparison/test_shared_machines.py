"""Tests comparisons in persistent resources: shared by equal machines, guarded, and always deleted."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.cli import cancel, compare
from deploy.in_job import job_files, pool_guard
from deploy.vertex.api import parse_time
from deploy.vertex.session import Session
from tests.deploy.conftest import JOB, ROOT, Capture, Command, FlyingClock, Job, needs_gcloud, rows
from tests.deploy.emulator import POSTS, Emulator, Fault
from trainer.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
SHARED, REQUESTED = "--persistent_resource=3h", "POST .*/persistentResources$"
IMAGE = ["--backend=sdk", "--image=us-docker.pkg.dev/p/r/x:1"]


class _Over(Exception):
    """Reports that the job of a guard was cancelled, or the test is over."""


class Guards:
    """Runs the real guards of the emulated jobs, whose clock is `ahead` of this machine's."""

    def __init__(self, train: Callable[[Emulator, Job], None] | None) -> None:
        self.train, self.ahead, self.step = train, 0.0, 0.0  # `step`: what each look adds

    def __call__(self, google: Emulator, job: Job) -> None:
        if "guards" in job["labels"]:
            self.guard(google, job)
        elif self.train:
            self.train(google, job)

    def guard(self, google: Emulator, job: Job) -> None:
        def sleep(_: float) -> None:
            self.ahead += self.step
            time.sleep(0.01)
            if google.closing or job["state"].endswith("CANCELLED"):
                raise _Over

        google.begin(job)
        variables = job["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["env"]
        start = json.loads(next(each["value"] for each in variables if each["name"] == "TRAINER_START"))
        try:
            plan = start["script"]
            pool_guard.run(pool_guard.Guard(plan, lambda: time.time() + self.ahead, sleep), plan)
            google.end(job, "SUCCEEDED")
        except _Over:
            pass
        except SystemExit as left:
            google.end(job, "FAILED", f"The replica workerpool0-0 exited with a non-zero status of {left.code}.")

    def wait(self, condition: Callable[[], bool]) -> None:
        """Waits until the guards have brought something about."""
        for _ in range(3000):
            if condition():
                return
            time.sleep(0.01)
        raise AssertionError("the guards did nothing")


@pytest.fixture
def guards(command: Command, cloud: Emulator, flying: FlyingClock, monkeypatch: pytest.MonkeyPatch) -> Guards:
    for module in (pool_guard, job_files):
        monkeypatch.setattr(module, "token", lambda: "of-the-job")
    cloud.resources.time = lambda: flying.time
    cloud.run = guards = Guards(cloud.run)
    return guards


def runs(cloud: Emulator) -> list[Job]:
    return [job for job in cloud.jobs.values() if "guards" not in job["labels"]]


def nothing_left(cloud: Emulator, tmp_path: Path) -> bool:
    """Returns whether no resource and no job costs anything, and none is recorded."""
    over = all(job["state"].endswith(("SUCCEEDED", "FAILED", "CANCELLED")) for job in cloud.jobs.values())
    return over and not cloud.resources.found and not (tmp_path / "out" / "persistent_resources.json").exists()


def test_equal_machines_are_made_once_and_run_one_job_at_a_time(
    guards: Guards, command: Command, cloud: Emulator, tmp_path: Path
) -> None:
    """Workers of a larger tier are in the same resource; the guard is there before it."""
    trained, together = guards.train, list[int]()
    assert trained

    def train(google: Emulator, job: Job) -> None:
        id = job["jobSpec"]["persistentResourceId"]
        others = [other for other in runs(google) if other["jobSpec"]["persistentResourceId"] == id]
        together.append(sum("endTime" not in other for other in others))
        trained(google, job)

    guards.train = train
    account = "--service_account=trainer@p.iam.gserviceaccount.com"
    shown = command("cpu", "cpu-2workers", "l4x1", "--repeats=2", SHARED, account)
    assert [row.state for row in rows(tmp_path)] == ["done"] * 3
    small, large = sorted(cloud.resources.ever, key=lambda made: "accelerator" in str(made))
    assert (small["resourcePools"][0]["replicaCount"], large["resourcePools"][0]["replicaCount"]) == ("2", "1")
    assert small["resourceRuntimeSpec"]["serviceAccountSpec"] == {"enableCustomServiceAccount": True}
    by_resource = [job["jobSpec"]["persistentResourceId"] for job in runs(cloud)]
    assert sorted(map(by_resource.count, set(by_resource))) == [2, 4]
    assert together == [1] * 6
    assert not any("usd-per-hour" in job["labels"] for job in runs(cloud))
    posted = [request for request in cloud.requests if request.startswith("POST /v1/")]
    assert posted[0].endswith("/customJobs")  # a guard
    for made in cloud.resources.ever:
        (guard,) = (job for job in cloud.jobs.values() if job["labels"].get("guards") == made["labels"]["submission"])
        assert guard["createTime"] < made["createTime"]
        assert guard["jobSpec"]["serviceAccount"] == "trainer@p.iam.gserviceaccount.com"
    assert nothing_left(cloud, tmp_path)
    assert shown.count("deleted persistent resource compare-") == 2


def test_what_it_costs_idle_is_said_before_anything_is_requested(command: Command, cloud: Emulator) -> None:
    """Also in a dry run. n1-standard-4: 0.19 USD an hour of Compute Engine x 1.15; a guard lives for 4.5 h at most."""
    flags = ["--price_per_hour=l4x1=2", "--repeats=3", SHARED, "--dry_run"]
    _, tier, _, resource, guard, together = command("l4x1", *flags).splitlines()
    assert tier == (
        "l4x1: 3 jobs, each on g2-standard-12 + 1 x NVIDIA_L4 in us-central1: in the persistent resource below"
    )
    assert resource == (
        "one persistent resource in us-central1 for l4x1 (g2-standard-12 + 1 x NVIDIA_L4): 2.00 USD an hour, used or "
        "idle, 6.00 USD at most, for 3:00:00 at most and the minutes of its deletion; one run at a time"
    )
    assert guard.startswith("its guard, a job on n1-standard-4: 0.22 USD an hour, 0.98 USD at most: deletes it ")
    assert "if this machine and the guard are both lost, it goes on costing 2.00 USD an hour until `python" in guard
    assert together == "all together: 6.98 USD at most; jobs in them cost nothing more"
    assert cloud.requests == []


def test_the_money_at_the_end_is_that_of_the_states(
    guards: Guards, command: Command, cloud: Emulator, flying: FlyingClock
) -> None:
    """From RUNNING until it is gone, used or not: at 3600 USD an hour a second costs 1 USD."""
    shown = command("cpu", SHARED, "--price_per_hour=cpu=3600")
    began = parse_time(cloud.resources.ever[0]["startTime"])
    assert began
    (line,) = (line for line in shown.splitlines() if line.startswith("deleted persistent resource"))
    said = float(line.split(" USD")[0].rsplit(" ", 1)[-1])
    assert said == pytest.approx(flying.time - began, abs=30)
    assert said > 30  # ten seconds between looks, and fifteen for the last lines of a log


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--spot"], "l4x1: scheduling.strategy=SPOT: a persistent resource has standard machines only: drop the"),
        (["--parallel=1"], "--parallel contradicts --persistent_resource, which runs one job at a time on equal"),
        (["--flex_start=2h"], "l4x1: scheduling.strategy=FLEX_START: a persistent resource has standard machines"),
    ],
)
def test_what_it_cannot_be_is_refused(flags: list[str], line: str, command: Command, cloud: Emulator) -> None:
    with pytest.raises(UserError, match=line):
        command("l4x1", SHARED, *flags)
    assert cloud.requests == []


def test_what_it_lasts_and_where_it_is_are_checked(command: Command, target: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--persistent_resource needs 30m at least"):
        command("cpu", "--persistent_resource=20m")
    with pytest.raises(UserError, match="--persistent_resource is for jobs of Vertex AI: add --on=vertex"):
        compare.main(["cpu", SHARED, *JOB])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "persistent_resources.json").write_text('{"a": {"id": 1}}')
    with pytest.raises(UserError, match=r"persistent_resources\.json is damaged: see `python -m deploy jobs`"):
        command("cpu")


def test_without_the_permission_of_the_guard_nothing_is_made(
    guards: Guards, command: Command, cloud: Emulator, tmp_path: Path
) -> None:
    """The job's account is asked before the machines are; later runs end at once."""
    cloud.faults = [Fault("DELETE .*/compare-2.*-none$", 403)]
    shown = command("cpu", "--repeats=2", SHARED, code=2)
    line = "repeat {}: the guard of persistent resources: status 403: the job's account needs the permission "
    line += "aiplatform.persistentResources.delete (docs/permissions.md)"
    assert all(f"cpu, {line.format(repeat)}" in shown for repeat in (1, 2))
    guards.wait(lambda: nothing_left(cloud, tmp_path))
    assert (cloud.resources.ever, len(cloud.jobs)) == ([], 1)


def test_without_the_permission_of_the_desk_nothing_is_sent(guards: Guards, command: Command, cloud: Emulator) -> None:
    cloud.faults = [Fault("DELETE .*/compare-none$", 403)]
    with pytest.raises(UserError, match=r"request roles/aiplatform\.admin on my-proj"):
        command("cpu", SHARED)
    assert cloud.jobs == {}


def test_machines_that_cannot_be_had_are_deleted_and_said(
    guards: Guards, command: Command, cloud: Emulator, tmp_path: Path
) -> None:
    cloud.resources.error = "Resources are insufficient in region: us-central1."
    cloud.resources.stopping = 30  # the guard may see the error first
    shown = command("cpu", "l4x1", "--repeats=2", SHARED, code=1)
    assert shown.count("failed: Resources are insufficient in region: us-central1: there may be no such machines") == 4
    assert (len(cloud.resources.ever), runs(cloud), nothing_left(cloud, tmp_path)) == (2, [], True)


def test_a_lost_response_to_the_creation_makes_one(
    guards: Guards, command: Command, cloud: Emulator, tmp_path: Path
) -> None:
    cloud.faults = [Fault(REQUESTED, 503, after=True)]
    command("cpu", SHARED)
    assert (len(cloud.resources.ever), nothing_left(cloud, tmp_path)) == (1, True)


def test_after_a_failed_run_the_machines_are_deleted(
    guards: Guards, command: Command, cloud: Emulator, tmp_path: Path
) -> None:
    guards.train = lambda google, job: google.end(job, "FAILED", "no disk")
    assert "cpu, repeat 2: exit code 1: no disk" in command("cpu", "--repeats=2", SHARED, code=1)
    assert (len(runs(cloud)), nothing_left(cloud, tmp_path)) == (2, True)


def test_a_guard_that_is_lost_ends_the_runs(guards: Guards, command: Command, cloud: Emulator, tmp_path: Path) -> None:
    trained = guards.train
    assert trained

    def train(google: Emulator, job: Job) -> None:
        for other in list(google.jobs.values()):
            if "guards" in other["labels"]:
                google.end(other, "CANCELLED")
        trained(google, job)

    guards.train = train
    shown = command("cpu", "--repeats=2", SHARED, code=1)
    assert re.search(r"cpu, repeat [12]: persistent resource compare-", shown)  # whichever came second
    assert "has no guard any more: it is deleted" in shown
    assert (len(runs(cloud)), nothing_left(cloud, tmp_path)) == (1, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_deletes_the_machines_and_the_same_command_goes_on(
    number: signal.Signals, guards: Guards, command: Command, cloud: Emulator, flying: FlyingClock, tmp_path: Path
) -> None:
    """The jobs in them are cancelled."""
    trained, resume, sent = guards.train, threading.Event(), list[bool]()
    assert trained

    def train(google: Emulator, job: Job) -> None:
        google.begin(job)
        if resume.is_set():
            trained(google, job)

    def stop() -> None:
        if runs(cloud) and not sent:
            sent.append(True)
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    guards.train, flying.asleep = train, stop
    shown = command("cpu", "--repeats=2", SHARED, code=75)
    assert "deleted persistent resource" in shown
    assert "is still running" not in shown
    assert ([job["state"] for job in runs(cloud)], nothing_left(cloud, tmp_path)) == (["JOB_STATE_CANCELLED"], True)
    resume.set()
    command("cpu", "--repeats=2", SHARED)
    assert (rows(tmp_path)[0].repeats, len(cloud.resources.ever), nothing_left(cloud, tmp_path)) == (2, 2, True)


def test_what_cannot_be_deleted_is_said(
    guards: Guards, cloud: Emulator, session: Session, target: list[str], capsys: Capture
) -> None:
    """The guard does it later."""
    cloud.faults = [Fault("DELETE .*/compare-2[^/]*(?<!-none)$", 403)]
    assert compare.main(["cpu", SHARED, *target, *IMAGE, *JOB], session) == 0
    said = capsys.readouterr().err
    (id,) = cloud.resources.found
    assert said.startswith(f"persistent resource {id} was not deleted (")
    assert ": injected (403): request roles/aiplatform.admin on my-proj" in said
    assert "0:15:00 without a job; sooner: python -m deploy cancel projects/my-proj/locations/us-central1/" in said
    guards.ahead = 901
    guards.wait(lambda: not cloud.resources.found)


@pytest.mark.slow
@needs_gcloud
def test_gcloud_makes_uses_and_deletes_it(
    guards: Guards, cloud: Emulator, session: Session, target: list[str], tmp_path: Path
) -> None:
    cloud.faults = [Fault(REQUESTED, 503, after=True)]  # gcloud itself repeats that
    assert compare.main(["cpu", SHARED, *target, IMAGE[1], *JOB], session) == 0
    assert (len(cloud.resources.ever), len(runs(cloud)), nothing_left(cloud, tmp_path)) == (1, 1, True)


# Where the desk is killed: at which request, if at one, and whether that was carried out.
POINTS = {
    "guard": (POSTS, True),
    "creation": (REQUESTED, True),
    "provisioning": ("", False),
    "submission": (POSTS, True),
    "run": ("", False),
    "deletion": ("DELETE .*/persistentResources/compare-2[^/]*(?<!-none)$", True),
}
SLOW = {"guard", "provisioning", "submission", "deletion"}
POINT = pytest.mark.parametrize(
    "point", [pytest.param(point, marks=pytest.mark.slow if point in SLOW else ()) for point in POINTS]
)


@pytest.fixture
def killed(guards: Guards, cloud: Emulator, target: list[str]) -> Callable[[str], None]:
    """Returns a function that runs a comparison in a process of its own, and kills that at a point."""
    desk = ROOT / "tests" / "deploy" / "comparison" / "desk.py"
    arguments = ["cpu", "--repeats=2", SHARED, *target, *IMAGE, *JOB]

    trained = guards.train
    assert trained

    def run(point: str) -> None:
        process = subprocess.Popen([sys.executable, str(desk), cloud.url, *arguments], stdout=subprocess.PIPE)
        match, after = POINTS[point]
        guard_first = [Fault(match, "slow")] if point == "submission" else []
        cloud.faults = [*guard_first, Fault(match, "cut", after=after, action=process.kill)] if match else []
        if point == "provisioning":
            cloud.resources.provisioning = 10**6

        def train(google: Emulator, job: Job) -> None:
            google.begin(job)
            if point == "run":
                process.kill()
            trained(google, job)

        guards.train = train
        if point == "provisioning":
            guards.wait(lambda: bool(cloud.resources.found))
            process.kill()
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
        for id in cloud.resources.found:
            cloud.resources.looks[id] = 1

    return run


@POINT
def test_the_same_command_goes_on_wherever_the_desk_was_killed(
    point: str, killed: Callable[[str], None], command: Command, cloud: Emulator, tmp_path: Path
) -> None:
    """What runs is used again, and everything is deleted in the end."""
    killed(point)
    command("cpu", "--repeats=2", SHARED)
    assert rows(tmp_path)[0].repeats == 2
    assert (len(cloud.resources.ever), cloud.resources.found) == (1, {})
    guarded = [job["state"] for job in cloud.jobs.values() if "guards" in job["labels"]]
    assert guarded[:-1] == ["JOB_STATE_CANCELLED"] * (point == "guard")
    assert guarded[-1] in ("JOB_STATE_CANCELLED", "JOB_STATE_SUCCEEDED")


@POINT
def test_the_guard_ends_it_wherever_the_desk_was_killed(
    point: str, killed: Callable[[str], None], guards: Guards, cloud: Emulator
) -> None:
    """An hour later, if nobody comes back, nothing is left, and no guard either."""
    killed(point)
    guards.wait(lambda: not runs(cloud) or all("endTime" in job for job in runs(cloud)))
    guards.step = 60.0
    guards.wait(lambda: all("endTime" in job for job in cloud.jobs.values()))
    assert not cloud.resources.found


def test_cancel_finds_what_a_killed_desk_left(killed: Callable[[str], None], cloud: Emulator, session: Session) -> None:
    killed("creation")
    (made,) = cloud.resources.ever
    assert cancel.main([made["name"].replace("123456", "my-proj"), "--backend=sdk", "--yes"], session) == 0
    assert (cloud.resources.found, ["endTime" in job for job in cloud.jobs.values()]) == ({}, [True])
