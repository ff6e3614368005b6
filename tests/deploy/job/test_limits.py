"""Tests jobs that end themselves at a limit, and what jobs are billed for, as the desk sees and
records both."""

import json
import math
import os
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
from deploy.cli import jobs, submit
from deploy.job.cost import format_duration
from deploy.job.options import JobOptions
from deploy.job.script import read_script
from deploy.job.workload import ScriptRun
from deploy.planning.paid_jobs import cost_lines, estimate
from deploy.platform.gcloud_and_sdk import Session
from deploy.report.collection import fetched
from deploy.tiers.tier import load_tier
from tests.deploy.conftest import JOB, Capture, Command, Job, error_of, output_of, put, rows, run
from tests.deploy.emulator import Emulator
from tests.deploy.planted import plant, planted_plan
from trainer.base.limit_watch import StopLimits, read_limits
from trainer.base.run_files.plan_file import kept_plan
from trainer.base.settings.request import Overrides

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
IMAGE = ["--backend=sdk", "--image=us-docker.pkg.dev/p/r/x:1"]
WHY = "all GPUs were below 10 % for 30 minutes (--stop_if_idle)"


def stops_first(folder: Path, cloud: Emulator) -> None:
    """Makes the first job end itself at a limit, as the trainer does, and the next one train to its
    end."""

    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        number = len(google.jobs)
        more: dict[str, Any] = {"state": "stopped", "error": WHY} if number == 1 else {}
        put(plant(folder / str(number), [0.2, 0.1, 0.1], **more), output_of(job))
        google.end(job, "SUCCEEDED")

    cloud.run = run


def sent_limits(job: Job) -> Any:
    env = job["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["env"]
    return read_limits({variable["name"]: variable["value"] for variable in env})


def test_a_job_that_ended_itself_is_told_by_submit_watch_and_jobs(
    cloud: Emulator, session: Session, target: list[str], tmp_path: Path, capsys: Capture
) -> None:
    stops_first(tmp_path / "trained", cloud)
    assert (
        submit.main(
            ["l4x1", *target[1:3], *IMAGE, *JOB, "--stop_if_idle=30m", "--register=digits"], session
        )
        == 75
    )
    assert not cloud.models, "it is not registered"
    (job,) = cloud.jobs.values()
    assert sent_limits(job).idle_s == 1800
    shown = capsys.readouterr()
    assert "STOPPED after" in shown.out
    assert f"error: {WHY}" in shown.err
    assert f"the same command with --job_dir={output_of(job)}" in shown.out
    assert jobs.run_watch([job["name"], "--backend=sdk"], session) == 75
    known = vertex_trainer.attach(job["name"], backend="sdk", session=session)
    assert (known.exit_code, known.status.state, known.status.error) == (75, "STOPPED", WHY)
    assert (known.result.state, known.result.content["error"]) == ("stopped", WHY)
    assert (
        jobs.run_jobs(["--project=my-proj", "--region=us-central1", "--backend=sdk"], session) == 0
    )
    assert f"{job['name']}: {WHY}" in capsys.readouterr().out
    bill = json.loads((fetched(str(output_of(job)), "job") / "billed.json").read_text())["jobs"]
    assert [*bill] == [job["name"]]
    assert bill[job["name"]]["seconds"] >= 0


def test_a_stopped_run_of_a_comparison_is_not_ranked_and_goes_on(
    command: Command, cloud: Emulator, tmp_path: Path
) -> None:
    """Both of its jobs are paid for."""
    stops_first(tmp_path / "trained", cloud)
    assert WHY in command("l4x1", "--stop_if_idle=30m", code=75)
    (row,) = rows(tmp_path)
    assert (row.state, row.has_speed, row.missing[0]) == (
        "stopped",
        False,
        f"the run ended as 'stopped': {WHY}",
    )
    command("l4x1", "--stop_if_idle=30m")
    first, second = cloud.jobs.values()
    assert output_of(first) == output_of(second)
    bill = json.loads((tmp_path / "out" / "l4x1" / "repeat-1" / "billed.json").read_text())["jobs"]
    assert {*bill} == {first["name"], second["name"]}
    assert rows(tmp_path)[0].state == "done"


def test_the_plans_upper_end_goes_along(
    cloud: Emulator,
    session: Session,
    target: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stops_first(tmp_path / "trained", cloud)
    path = kept_plan(Overrides.parse(JOB).resolve())
    path.parent.mkdir(parents=True)
    shutil.copy(planted_plan(tmp_path), path)
    assert submit.main(["l4x1", *target[1:3], *IMAGE, *JOB, "--stop_if_over=1.5"], session) == 75
    (job,) = cloud.jobs.values()
    limits = sent_limits(job)
    assert (limits.idle_s, limits.factor) == (0, 1.5)
    assert limits.over_s > 0


def runs_for(share: float) -> Callable[[Emulator, Job], None]:
    """Returns a job that runs for a share of its timeout, and ends as Vertex AI ends one there."""

    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        timeout_s = float(job["jobSpec"]["scheduling"]["timeout"][:-1])
        job["startTime"] = f"{datetime.now(UTC) - timedelta(seconds=share * timeout_s):%FT%TZ}"
        google.end(job, "EXPIRED")

    return run


CAPPED = ["l4x1", "--region=us-central1", "--bucket=gs://my-bucket", *IMAGE, *JOB, "--max_cost=5"]


def test_what_a_job_spent_until_its_timeout_is_spent_for_the_next_tier_and_the_same_command(
    cloud: Emulator, session: Session, capsys: Capture
) -> None:
    """It has started, so it is no lack of machines; the rest of the cap is what may still be
    paid."""
    cloud.run = runs_for(0.6)
    command = [CAPPED[0], "l4x4", *CAPPED[1:]]
    assert submit.main(command, session) == 75
    first = cloud.jobs["1000"]
    assert len(cloud.jobs) == 1
    timeout_s = int(first["jobSpec"]["scheduling"]["timeout"][:-1])
    shown = capsys.readouterr()
    said = f"it ran for {format_duration(timeout_s)}, the most that its plan, --max_cost or"
    assert said in shown.err
    assert (
        f"the same command, elsewhere the same command with --job_dir={output_of(first)}"
        in shown.out
    )
    assert submit.main(command, session) == 75
    assert f"goes on where {first['name']} stopped at a limit" in capsys.readouterr().out
    second = cloud.jobs["1001"]
    assert output_of(second) == output_of(first)
    rest = int(second["jobSpec"]["scheduling"]["timeout"][:-1])
    assert rest == pytest.approx(0.4 * timeout_s, abs=3)
    cloud.run = runs_for(1.0)
    assert submit.main(command, session) == 75, "16 % are left"
    refused = error_of(submit.main, command, session)
    assert refused.startswith("max_cost=5: 5.00 USD of it are spent, the last by ")
    assert f"to go on, raise it, with --job_dir={output_of(first)}" in refused
    assert len(cloud.jobs) == 3


def test_a_detached_job_that_stopped_goes_on_and_again_begins_anew(
    cloud: Emulator, session: Session
) -> None:
    cloud.run = runs_for(0.5)
    for flags, folders in ((["--detach"], 1), (["--detach"], 1), (["--detach", "--again"], 2)):
        assert submit.main([*CAPPED, *flags], session) == 0
        assert len({output_of(job) for job in cloud.jobs.values()}) == folders
    assert len(cloud.jobs) == 3


def test_what_a_run_of_a_comparison_spent_counts_for_its_next_attempt(
    command: Command, cloud: Emulator
) -> None:
    cloud.run = runs_for(0.5)
    for count in (1, 2):
        command("l4x1", "--max_cost=5", code=75)
        assert len(cloud.jobs) == count
    first, second = (
        int(job["jobSpec"]["scheduling"]["timeout"][:-1]) for job in cloud.jobs.values()
    )
    assert second == pytest.approx(first / 2, abs=3)


@pytest.mark.parametrize(
    ("flags", "limit_s"),
    [([], 1800), (["--steps=400000"], None), (["--timeout=5h"], 18000)],
    ids=["at least 30 minutes", "three times the plan", "as the user says"],
)
def test_a_job_with_a_plan_may_take_three_times_its_upper_end(
    flags: list[str],
    limit_s: int | None,
    cloud: Emulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = ["a100-80x8", "--project=p", *CAPPED[1:3], *JOB, *flags, "--dry_run", "--json"]
    path = kept_plan(Overrides.parse(JOB).resolve())
    path.parent.mkdir(parents=True)
    shutil.copy(planted_plan(tmp_path), path)
    request = parse_verb(submit.SubmitFlags, command, USAGE)
    (job,) = prepare_submission(request, Session()).jobs
    priced = estimate(job)
    assert priced
    assert job.tier.timeout_s == limit_s or job.tier.timeout_s == math.ceil(
        3 * 3600 * priced.hours.high
    )
    assert job.tier.timeout_s >= 1800
    assert any(
        f"after {format_duration(job.tier.timeout_s)} it ends, and the same command goes on" in line
        for line in cost_lines([job])
    )


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


@pytest.mark.parametrize(
    ("handler", "grace"), [("save", "1e9"), ("signal.SIG_IGN", "30.0")], ids=["saves", "hangs"]
)
def test_a_script_that_stalls_ends_as_stopped(
    handler: str, grace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs as in a job: beside what its archive holds, by the standard library alone.

    However long its start is, idle time counts from its first report. One that hangs is killed.
    """
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(STALLS.replace("HANDLER", handler))
    script = read_script(JobOptions(script="train.py"), [], {})
    shutil.unpack_archive(script.package().build(), "unpacked", "zip")
    plan = ScriptRun(load_tier("cpu"), script).local_program(tmp_path / "job").variables
    limits = StopLimits(idle_s=1800.0).text
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": "unpacked/ours",
        "TRAINER_LIMITS": limits,
        **plan,
    }
    done = run(
        [sys.executable, "-S", "-c", WATCHES.replace("GRACE\n", f"{grace}\n")], env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "halfway to a limit" in done.stdout
    result = json.loads((tmp_path / "job" / "result.json").read_text())
    assert (result["state"], result["error"], result["steps"]) == ("stopped", WHY, 5)
    assert (tmp_path / "job" / "code" / "saved").exists() == (handler == "save")
