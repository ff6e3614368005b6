"""Tests jobs that end themselves at a limit, and what jobs are billed for, as the desk sees and
records both."""

import math
import shutil
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import vertex_trainer
from deploy.api.request import parse_verb
from deploy.api.submit import USAGE, prepare_submission
from deploy.cli import submit
from deploy.job.cost import format_duration
from deploy.job.options import JobOptions
from deploy.job.script import read_script
from deploy.job.workload import ScriptRun
from deploy.planning.paid_jobs import cost_lines, estimate
from deploy.report.collection import fetched
from deploy.tiers.tier import load_tier
from tests.deploy.conftest import (
    JOB,
    WHERE,
    Command,
    Job,
    output_of,
    put,
    rows,
    run,
    task_of,
    variables_of,
)
from tests.deploy.emulator import Emulator
from tests.deploy.planted import content, keep_plan, plant
from tests.fixtures import Json, Patch
from trainer.base.limit_watch import StopLimits, read_limits

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
IMAGE = ["--backend=sdk", "--image=us-docker.pkg.dev/p/r/x:1"]
WHY = "all GPUs were below 10 % for 30 minutes (--stop_if_idle)"


def stops_first(folder: Path, cloud: Emulator) -> None:
    """Makes the first job end itself at a limit, as the trainer does, and the next one train to its
    end."""

    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        number = len(google.jobs)
        more: Json = {"state": "stopped", "error": WHY} if number == 1 else {}
        put(plant(folder / str(number), [0.2, 0.1, 0.1], **more), output_of(job))
        google.end(job, "SUCCEEDED")

    cloud.run = run


def sent_limits(job: Job) -> Any:
    return read_limits(variables_of(task_of(job)))


def test_a_job_that_ended_itself_is_told_by_submit_watch_and_jobs(
    cloud: Emulator, target: list[str], typed: Command
) -> None:
    stops_first(Path("trained"), cloud)
    flags = ["--stop_if_idle=30m", "--register=digits"]
    shown = typed("submit", "l4x1", *target[1:3], *IMAGE, *JOB, *flags, code=75)
    assert not cloud.models, "it is not registered"
    job = cloud.job
    assert sent_limits(job).idle_s == 1800
    assert "STOPPED after" in shown
    assert f"error: {WHY}" in shown
    assert f"the same command with --job_dir={output_of(job)}" in shown
    typed("watch", job["name"], code=75)
    known = vertex_trainer.attach(job["name"])
    assert known.exit_code == 75
    assert known.status.state == "STOPPED"
    assert known.status.error == WHY
    assert known.result.state == "stopped"
    assert known.result.content["error"] == WHY
    assert f"{job['name']}: {WHY}" in typed("jobs", "--project=my-proj", "--region=us-central1")
    bill = content(fetched(str(output_of(job)), "job") / "billed.json")["jobs"]
    assert [*bill] == [job["name"]]
    assert bill[job["name"]]["seconds"] >= 0


def test_a_stopped_run_of_a_comparison_is_not_ranked_and_goes_on(
    command: Command, cloud: Emulator
) -> None:
    """Both of its jobs are paid for."""
    stops_first(Path("trained"), cloud)
    assert WHY in command("l4x1", "--stop_if_idle=30m", code=75)
    (row,) = rows()
    assert row.state == "stopped"
    assert not row.has_speed
    assert row.missing[0] == f"the run ended as 'stopped': {WHY}"
    command("l4x1", "--stop_if_idle=30m")
    first, second = cloud.jobs.values()
    assert output_of(first) == output_of(second)
    bill = content("out/l4x1/repeat-1/billed.json")["jobs"]
    assert {*bill} == {first["name"], second["name"]}
    assert rows()[0].state == "done"


def test_the_plans_upper_end_goes_along(
    cloud: Emulator, target: list[str], monkeypatch: Patch, typed: Command
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    keep_plan(JOB)
    stops_first(Path("trained"), cloud)
    typed("submit", "l4x1", *target[1:3], *IMAGE, *JOB, "--stop_if_over=1.5", code=75)
    limits = sent_limits(cloud.job)
    assert limits.idle_s == 0
    assert limits.factor == 1.5
    assert limits.over_s > 0


def timeout_of(job: Job) -> int:
    return int(job["jobSpec"]["scheduling"]["timeout"][:-1])


def runs_for(share: float) -> Callable[[Emulator, Job], None]:
    """Returns a job that runs for a share of its timeout, and ends as Vertex AI ends one there."""

    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        job["startTime"] = (
            f"{datetime.now(UTC) - timedelta(seconds=share * timeout_of(job)):%FT%TZ}"
        )
        google.end(job, "EXPIRED")

    return run


CAPPED = ["l4x1", *WHERE, *IMAGE, *JOB, "--max_cost=5"]


def test_what_a_job_spent_until_its_timeout_is_spent_for_the_next_tier_and_the_same_command(
    cloud: Emulator, typed: Command
) -> None:
    """It has started, so it is no lack of machines; the rest of the cap is what may still be
    paid."""
    cloud.run = runs_for(0.6)
    command = [CAPPED[0], "l4x4", *CAPPED[1:]]
    shown = typed("submit", *command, code=75)
    first = cloud.job
    timeout_s = timeout_of(first)
    assert f"it ran for {format_duration(timeout_s)}, the most that its plan, --max_cost" in shown
    assert f"elsewhere the same command with --job_dir={output_of(first)}" in shown
    shown = typed("submit", *command, code=75)
    assert f"continues where {first['name']} stopped at a limit" in shown
    second = cloud.jobs["1001"]
    assert output_of(second) == output_of(first)
    rest = timeout_of(second)
    assert rest == pytest.approx(0.4 * timeout_s, abs=3)
    cloud.run = runs_for(1.0)
    typed("submit", *command, code=75)
    shown = typed("submit", *command, code=2)
    assert "max_cost=5: 5.00 USD of it are spent, the last by " in shown
    assert f"to continue, raise it, with --job_dir={output_of(first)}" in shown
    assert len(cloud.jobs) == 3


def test_a_detached_job_that_stopped_goes_on_and_again_begins_anew(
    cloud: Emulator, typed: Command
) -> None:
    cloud.run = runs_for(0.5)
    for flags, folders in ((["--detach"], 1), (["--detach"], 1), (["--detach", "--again"], 2)):
        typed("submit", *CAPPED, *flags)
        assert len({output_of(job) for job in cloud.jobs.values()}) == folders
    assert len(cloud.jobs) == 3


def test_what_a_run_of_a_comparison_spent_counts_for_its_next_attempt(
    command: Command, cloud: Emulator
) -> None:
    cloud.run = runs_for(0.5)
    for count in (1, 2):
        command("l4x1", "--max_cost=5", code=75)
        assert len(cloud.jobs) == count
    first, second = map(timeout_of, cloud.jobs.values())
    assert second == pytest.approx(first / 2, abs=3)


def test_a_job_with_a_plan_may_take_three_times_its_upper_end(
    cloud: Emulator, monkeypatch: Patch
) -> None:
    """At least 30 minutes, and as long as the user says."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    keep_plan(JOB)
    for flag, limit_s in (("--steps=4", 1800), ("--steps=400000", 0), ("--timeout=5h", 18000)):
        command = ["a100-80x8", "--project=p", *WHERE, *IMAGE, *JOB, flag, "--dry_run"]
        request = parse_verb(submit.SubmitFlags, command, USAGE)
        (job,) = prepare_submission(request).jobs
        priced = estimate(job)
        assert priced
        seconds = job.tier.timeout_s
        assert seconds == (limit_s or math.ceil(3 * 3600 * priced.hours.high))
        ends = f"after {format_duration(seconds)} it ends, and the same command resumes it"
        assert ends in "\n".join(cost_lines([job]))


STALLS = """
import pathlib, signal, sys, time
from vertex_report import report
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(3)
signal.signal(signal.SIGTERM, HANDLER)
for step in range(1, 6):
    report(step=step, loss=1 / step)
pathlib.Path("stalls").touch()
time.sleep(300)
"""
# An hour passes between two looks once the script stalls; its GPU is idle from the start.
WATCHES = """
import os, sys, types
from in_job import script_worker
from trainer.base import limit_watch
def monotonic(hours=[0]):
    hours[0] += os.path.exists("stalls")
    return 3600.0 * hours[0]
limit_watch.time = types.SimpleNamespace(monotonic=monotonic)
limit_watch.read_gpus = lambda: [{"utilization_percent": 4.0}]
limit_watch.CHECK_S, limit_watch.GRACE_S = 0.05, GRACE
sys.exit(script_worker.main())
"""


@pytest.mark.parametrize(("handler", "grace"), [("save", "1e9"), ("signal.SIG_IGN", "30.0")])
def test_a_script_that_stalls_ends_as_stopped(handler: str, grace: str) -> None:
    """It runs as in a job: beside what its archive holds, by the standard library alone.

    However long its start is, idle time counts from its first report. One that hangs is killed.
    """
    Path("train.py").write_text(STALLS.replace("HANDLER", handler))
    script = read_script(JobOptions(script="train.py"), [], {})
    shutil.unpack_archive(script.package().build(), "unpacked", "zip")
    plan = ScriptRun(load_tier("cpu"), script).local_program(Path("job").absolute()).variables
    limits = StopLimits(idle_s=1800.0).text
    environment = {**plan, "PYTHONPATH": "unpacked/ours", "TRAINER_LIMITS": limits}
    watches = WATCHES.replace("GRACE\n", f"{grace}\n")
    done = run([sys.executable, "-S", "-c", watches], env=environment)
    assert done.returncode == 0, done.stderr
    assert "halfway to a limit" in done.stdout
    result = content("job/result.json")
    assert result["state"] == "stopped"
    assert result["error"] == WHY
    assert result["steps"] == 5
    assert Path("job/code/saved").exists() == (handler == "save")
