"""Tests jobs that end themselves at a limit, and what jobs are billed for, as the desk sees and records both."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import vertex_trainer
from deploy.cli import jobs, submit
from deploy.job.script import read_script
from deploy.job.workload import ScriptRun
from deploy.platform.gcloud_and_sdk import Session
from deploy.report.collection import fetched
from deploy.tiers.tier import load_tier
from tests.deploy.conftest import JOB, Capture, Command, Job, output_of, put, rows, run
from tests.deploy.emulator import Emulator
from tests.deploy.planted import plant, planted_plan
from trainer.base.limit_watch import StopLimits, read_limits
from trainer.base.run_files.plan_file import kept_plan
from trainer.base.settings.request import Overrides

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
IMAGE = ["--backend=sdk", "--image=us-docker.pkg.dev/p/r/x:1"]
WHY = "all GPUs were below 10 % for 30 minutes (--stop_if_idle)"


def stops_first(folder: Path, cloud: Emulator) -> None:
    """Makes the first job end itself at a limit, as the trainer does, and the next one train to its end."""

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
    assert submit.main(["l4x1", *target[1:3], *IMAGE, *JOB, "--stop_if_idle=30m", "--register=digits"], session) == 75
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
    assert jobs.run_jobs(["--project=my-proj", "--region=us-central1", "--backend=sdk"], session) == 0
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
        "stopped", False, f"the run ended as 'stopped': {WHY}",
    )  # fmt: skip
    command("l4x1", "--stop_if_idle=30m")
    first, second = cloud.jobs.values()
    assert output_of(first) == output_of(second)
    bill = json.loads((tmp_path / "out" / "l4x1" / "repeat-1" / "billed.json").read_text())["jobs"]
    assert {*bill} == {first["name"], second["name"]}
    assert rows(tmp_path)[0].state == "done"


def test_the_plans_upper_end_goes_along(
    cloud: Emulator, session: Session, target: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize(("handler", "grace"), [("save", "1e9"), ("signal.SIG_IGN", "30.0")], ids=["saves", "hangs"])
def test_a_script_that_stalls_ends_as_stopped(
    handler: str, grace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs as in a job: beside what its archive holds, by the standard library alone.

    However long its start is, idle time counts from its first report. One that hangs is killed.
    """
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(STALLS.replace("HANDLER", handler))
    script = read_script("train.py", "", "", [])
    shutil.unpack_archive(script.package().build(), "unpacked", "zip")
    _, plan = ScriptRun(load_tier("cpu"), script).local_program(tmp_path / "job")
    limits = StopLimits(idle_s=1800.0).text
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": "unpacked/ours", "TRAINER_LIMITS": limits, **plan}
    done = run([sys.executable, "-S", "-c", WATCHES.replace("GRACE\n", f"{grace}\n")], env=environment)
    assert done.returncode == 0, done.stderr
    assert "halfway to a limit" in done.stdout
    result = json.loads((tmp_path / "job" / "result.json").read_text())
    assert (result["state"], result["error"], result["steps"]) == ("stopped", WHY, 5)
    assert Path("saved").exists() == (handler == "save")
