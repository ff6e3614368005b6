"""Tests jobs that end themselves at a limit, and what jobs are billed for, as the desk sees and records both."""

import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import vertex_trainer
from deploy.cli import jobs, submit, watch
from deploy.in_job.script_idle_gpus import LOOK_S, IdleGpus
from deploy.report.collection import fetched
from deploy.tiers.script import ScriptRequest, read_script
from deploy.tiers.tier import load_tier
from deploy.vertex.session import Session
from tests.deploy.conftest import JOB, ROOT, Capture, Command, Job, output_of, put, rows, run
from tests.deploy.emulator import Emulator
from tests.deploy.planted import plant, planted_plan
from tests.deploy.registry_emulator import versions
from tests.nvidia_smi import PlantedGpu
from trainer.base.run_files.plan_file import kept_plan
from trainer.base.run_files.stop_limits import StopLimits, read_limits
from trainer.base.settings.resolution import Overrides

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
IMAGE = ["--backend=sdk", "--image=us-docker.pkg.dev/p/r/x:1"]
WHY = "all GPUs were below 10 % for 30 minutes (--stop_if_idle)"


def stops_first(folder: Path, cloud: Emulator) -> None:
    """Makes the first job end itself at a limit, as the trainer does, and the next one train to its end."""
    numbers = itertools.count(1)

    def run(google: Emulator, job: Job) -> None:
        google.begin(job)
        number = next(numbers)
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
    where = [flag for flag in target if not flag.startswith(("--on", "--out"))]
    command = ["l4x1", *where, *IMAGE, *JOB, "--stop_if_idle=30m", "--register=digits"]
    assert submit.main(command, session) == 75
    assert not versions(cloud), "it is not registered"
    (job,) = cloud.jobs.values()
    assert sent_limits(job).idle_s == 1800
    shown = capsys.readouterr()
    assert "STOPPED after" in shown.out
    assert f"error: {WHY}" in shown.err
    assert f"the same command with --job_dir={output_of(job)}" in shown.out
    assert watch.main([job["name"], "--backend=sdk"], session) == 75
    known = vertex_trainer.attach(job["name"], backend="sdk", session=session)
    assert (known.exit_code, known.status.state, known.status.error) == (75, "STOPPED", WHY)
    assert (known.result.state, known.result.content["error"]) == ("stopped", WHY)
    assert jobs.main(["--project=my-proj", "--region=us-central1", "--backend=sdk"], session) == 0
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
    assert (row.state, row.has_speed, row.missing["total_seconds"]) == (
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
    where = [flag for flag in target if not flag.startswith(("--on", "--out"))]
    assert submit.main(["l4x1", *where, *IMAGE, *JOB, "--stop_if_over=1.5"], session) == 75
    (job,) = cloud.jobs.values()
    limits = sent_limits(job)
    assert (limits.idle_s, limits.factor) == (0, 1.5)
    assert limits.over_s > 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["l4x1", "--stop_if_idle=0"], "'0' must be a time of up to 30 days with its unit"),
        (["cpu", "--stop_if_idle=30m"], "--stop_if_idle is for GPUs, and cpu has none: leave it out"),
        (["l4x1", "--stop_if_over=1.5"], "stop_if_over=1.5: there is no plan of the time on l4x1: --plan makes one"),
        (["l4x1", "--stop_if_over=0.5"], "'0.5' must be a number from 1 to 999"),
    ],
)
def test_limits_that_cannot_hold_are_refused(arguments: list[str], line: str, refused: Command, tmp_path: Path) -> None:
    where = ["--region=us-central1", "--bucket=gs://my-bucket", "--project=p", *IMAGE, *JOB]
    assert line in refused("submit", *arguments, f"--cache_dir={tmp_path}", *where)


def test_a_script_that_leaves_all_gpus_idle_is_ended(capsys: Capture) -> None:
    """Its start is free; use of one GPU or a reported step ends the idleness; unknown use is none, and told once."""
    now, use, reports = 0.0, list[float](), 0
    idle = IdleGpus({"TRAINER_LIMITS": '{"idle_s": 60}'}, lambda: now, lambda: use)
    ended = dict[float, str]()
    for now in map(float, range(0, 700, 5)):
        use = [3.0, 40.0] if 200 <= now < 210 else [] if 250 <= now < 330 else [3.0, 9.0]
        reports += 330 <= now < 500 and now % 50 == 0
        ended |= {now: reason} if (reason := idle.reason(reports)) else {}
    assert 0 <= min(ended) - 450 - 60 <= 2 * LOOK_S
    lines = [json.loads(line)["message"] for line in capsys.readouterr().out.splitlines()]
    half = "half of the time is over until this job ends itself: all GPUs were below 10 % for 0.5 minutes"
    told = [line.removesuffix(" (--stop_if_idle)") for line in lines]
    assert sorted(told) == [half] * 4 + [
        "nvidia-smi does not say how much the GPUs are used: so long --stop_if_idle ends nothing"
    ]
    assert {*ended.values()} == {StopLimits(idle_s=60.0).idle}, "as the trainer says it"


STALLS = """
import signal, sys, time
from vertex_report import report
def save(*_):
    open("saved", "w").close()
    sys.exit(3)
signal.signal(signal.SIGTERM, save)
for step in range(1, 6):
    time.sleep(0.4)
    report(step=step, loss=1 / step)
time.sleep(300)
"""


LOOKS_OFTEN = """
import sys
from deploy.in_job import script_idle_gpus, script_worker
script_idle_gpus.LOOK_S = 0.05
sys.exit(script_worker.main())
"""


def test_a_script_that_stalls_saves_and_ends_as_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPU is idle all the time: as long as it reports steps it goes on, then it is ended, and the job with 0."""
    monkeypatch.chdir(tmp_path)
    PlantedGpu(tmp_path / "bin", monkeypatch, 4)
    Path("train.py").write_text(STALLS)
    _, plan = ScriptRequest(load_tier("cpu"), read_script("train.py", "", "", [])).local_program(tmp_path / "job")
    limits = StopLimits(idle_s=1.5)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TRAINER_LIMITS": limits.text, **plan}
    done = run([sys.executable, "-c", LOOKS_OFTEN], env=environment)
    assert done.returncode == 0, done.stderr
    assert "half of the time is over" in done.stdout
    result = json.loads((tmp_path / "job" / "result.json").read_text())
    assert (result["state"], result["error"], result["steps"]) == ("stopped", limits.idle, 5)
    assert Path("saved").exists()
