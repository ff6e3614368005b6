"""Tests a script of the user's own on this machine and on Vertex AI: what it finds, its numbers,
its ends."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from deploy.__main__ import main
from deploy.job.options import JobOptions
from deploy.job.script import read_script
from deploy.job.workload import ScriptRun
from deploy.platform import local as processes
from deploy.platform.local import LocalJob, local_workers
from deploy.report.collection import collect
from deploy.report.measures import summarize
from deploy.tiers.tier import load_tier
from tests.deploy.conftest import (
    ROOT,
    WHERE,
    Capture,
    Command,
    Job,
    is_alive,
    needs_gcloud,
    output_of,
    rows,
    run,
)
from tests.deploy.emulator import Emulator, Fault
from tests.deploy.planted import content, write_files
from tests.fixtures import Json, Patch
from tests.workers import until

REPORTS = """
import time
from vertex_report import report
for step in range(1, 9):
    time.sleep(0.01)
    report(step=10 * step, loss=1 / step, accuracy=step / 8)
"""
FINDS = """
import json, os, sys, time
found = {"words": sys.argv[1:], "variables": dict(os.environ)}
found |= {"path": sys.path, "folder": os.getcwd(), "cores": [*os.sched_getaffinity(0)]}
with open(os.environ["RANK"], "w") as file:
    json.dump(found, file)
os.rename(os.environ["RANK"], os.environ["RANK"] + ".json")
while os.environ["RANK"] == "0" and not os.path.exists("1.json"):  # the job ends with its chief
    time.sleep(0.02)
"""


def script(text: str) -> Path:
    """Writes a script below the working folder."""
    return write_files({"train.py": text}, "mine") / "train.py"


def result(folder: str = "runs/a") -> Json:
    return content(Path(folder, "result.json"))


def local(tier: str, *more: str) -> int:
    return main(["local", tier, "--script=mine/train.py", "--job_dir=runs/a", *more])


def test_a_script_finds_what_vertex_gives_it(monkeypatch: Patch) -> None:
    """Its arguments are intact, and one file of ours is on its path."""
    script(FINDS)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}/elsewhere")
    words = ["--name", "two words", "\"q'", "", "$HOME *", "--", "--steps=3"]
    assert local("cpu-2workers", "--", *words) == 0
    cores: list[int] = []
    for rank in (0, 1):
        found = content(f"runs/a/code/{rank}.json")
        variables = found["variables"]
        folder = str(Path("runs/a").absolute())
        spec = json.loads(variables["CLUSTER_SPEC"])
        config = json.loads(variables["TF_CONFIG"])
        assert found["words"] == words
        assert found["folder"] == f"{folder}/code"
        assert spec["task"] == {"type": f"workerpool{rank}", "index": 0}
        assert config["task"]["type"] == ("worker" if rank else "chief")
        assert [*config["cluster"].values()] == [*spec["cluster"].values()]
        assert (
            f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
            == spec["cluster"]["workerpool0"][0]
        )
        assert variables["WORLD_SIZE"] == "2"
        assert variables["LOCAL_RANK"] == "0"
        assert variables["AIP_MODEL_DIR"] == f"{folder}/model/"
        assert variables["CLOUD_ML_JOB_ID"].startswith("local-")
        assert not [name for name in variables if name.startswith("TRAINER_")]
        assert variables["PYTHONPATH"].split(os.pathsep)[1:] == ["/elsewhere"]
        assert "vertex_report.py" in os.listdir(found["path"][1])
        cores += found["cores"]
    assert len({*cores}) == len(cores) or len(os.sched_getaffinity(0)) == 1


TORN = """
if os.fork() == 0:
    report(step=90, loss=float("nan"), accuracy=0.75)
    os._exit(0)
os.wait()
with open(os.environ["VERTEX_REPORT_FILE"], "ab") as file:
    file.write(b"[1.0, {")
"""


def test_its_numbers_come_from_its_reports() -> None:
    """In the order in which they were made, also from a process that it starts, and with a torn
    last line."""
    script(f"import os{REPORTS}{TORN}")
    assert local("cpu") == 0
    lines = [json.loads(line) for line in Path("runs/a/stats.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(10, 91, 10)]
    assert [line["metrics"]["accuracy"] for line in lines[-2:]] == [1.0, 0.75]
    assert lines[-1]["losses"] == {"loss": None}
    assert min(line["step_seconds"] for line in lines[1:8]) >= 0.001, (
        "10 ms for 10 steps, whenever they are read"
    )


def test_a_report_outside_a_job_is_printed() -> None:
    code = "from vertex_report import report; report(step=3, loss=0.5)"
    importable = {"PYTHONPATH": str(ROOT / "deploy/in_job/importable")}
    assert run([sys.executable, "-c", code], env=importable).stdout == '{"step": 3, "loss": 0.5}\n'


@pytest.mark.parametrize(
    ("ends", "code"),
    [("sys.exit(7)", 7), ("raise ValueError", 1), ("os.kill(os.getpid(), 9)", 137)],
)
def test_the_exit_code_is_its_own(ends: str, code: int, capsys: Capture) -> None:
    script(f"import os, sys\nprint('begins')\n{ends}")
    assert local("cpu") == code
    found = result()
    assert found["state"] == "failed"
    assert found["exit_code"] == code
    assert found["steps"] == 0
    assert found["wall_seconds"] > 0
    assert found["error"].startswith(f"train.py exited with status {code}: ")
    assert f"exited with a non-zero status of {code}." in capsys.readouterr().err


def test_it_is_restarted_as_vertex_does_and_its_time_is_counted(capsys: Capture) -> None:
    script(
        "import os, sys\nfirst = not os.path.exists('began')\nopen('began', 'w')\nsys.exit(3 *"
        " first)"
    )
    assert local("cpu", "--restarts=1") == 0
    assert result()["state"] == "done"
    assert result()["restarts"] == 1
    assert "exited with status 3: restart 1 of 1" in capsys.readouterr().out


def test_a_script_that_hangs_leaves_no_process(tmp_path: Path, monkeypatch: Patch) -> None:
    """It ignores SIGTERM, and has a process of its own."""
    monkeypatch.setattr(processes, "EXIT_TIMEOUT_S", 0.3)
    path = script(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nchild ="
        " os.fork()\nif child: print('pids', os.getpid(), child)\ntime.sleep(300)"
    )
    said: list[str] = []
    tier = load_tier("cpu")
    folder = tmp_path / "job"
    made = read_script(JobOptions(script=str(path)), [], {})
    program = ScriptRun(tier, made).local_program(folder)
    job = LocalJob(local_workers(tier, [], folder, "local-1", program=program), print)

    def say(name: str, line: str) -> None:
        said.append(line)
        if line.startswith("pids"):
            job.stopped.set()

    job.print_line = say
    assert job.run().state == "CANCELLED"
    pids = [pid for line in said if line.startswith("pids") for pid in line.split()[1:]]
    assert len(pids) == 2
    until(lambda: not any(map(is_alive, pids)), 10)


def test_a_script_without_numbers_has_time_and_state(typed: Command) -> None:
    script("print('trains')")
    shown = typed(
        "compare", "cpu", "--script=mine/train.py", "--out=runs/c", "--price_per_hour=cpu=3.6"
    )
    (row,) = summarize(collect(["runs/c"]), usd_by_tier={"cpu": 3.6})
    assert row.state == "done"
    assert row.steps == 0
    assert row.images_per_second is None
    assert row.total_seconds == result("runs/c/cpu/repeat-1")["wall_seconds"]
    assert row.cost == pytest.approx(0.001 * row.total_seconds)
    assert "stats.jsonl is missing" in shown


def test_two_tiers_are_compared_as_those_of_a_recipe(typed: Command) -> None:
    """tests/deploy/report/test_summary.py computes each cell again from such files."""
    script(REPORTS)
    prices = ["--price_per_hour=cpu=3.6", "--price_per_hour=l4x2=7.2"]
    command = ["compare", "cpu", "l4x2", "--script=mine/train.py", *prices, "--out=out", "--"]
    shown = typed(*command, "two words")
    assert shown.startswith("runs python train.py 'two words', as it is: it calls no fit of Keras")
    cpu, simulated = summarize(collect(["out"]), usd_by_tier={"cpu": 3.6, "l4x2": 7.2})
    assert cpu.steps == 80
    assert cpu.final_loss == 1 / 8
    assert cpu.final_accuracy == 1.0
    assert cpu.cost == pytest.approx(cpu.total_seconds * 3.6 / 3600)
    assert cpu.simulated == ""
    assert simulated.simulated == "NVIDIA_L4 simulated on a CPU"
    assert simulated.cost is None
    assert "steps/s" in shown
    assert "global batch is the same" not in shown, "nobody knows"
    assert typed(*command, "two words").count(": done before") == 2
    error = typed(*command, "other", code=2)
    assert "holds another comparison (arguments: 'two words' stored, other given)" in error


OWN_TRAINER = """
import sys
import trainer
from trainer import helper
from vertex_report import report
print("words", sys.argv[1:], helper.NAME, trainer.__file__.endswith("code/trainer/__init__.py"))
for name in ("deploy", "in_job", "bootstrap"):
    try:
        __import__(name)
    except ImportError:
        print("no", name)
for step in (10, 20, 30):
    report(step=step, loss=1 / step)
"""


@pytest.mark.parametrize("backend", [pytest.param("gcloud", marks=needs_gcloud), "sdk"])
def test_a_package_called_trainer_runs_on_two_workers(
    backend: str, vertex: Emulator, typed: Command
) -> None:
    """As in Google's samples. Its numbers are in the bucket, and `jobs` shows them."""
    files = {"task.py": OWN_TRAINER, "helper.py": "NAME = 'mine'", "__init__.py": ""}
    write_files(files, "mine/trainer")
    words = ["two words", '"q"', "", "--epochs=3"]
    flags = ["--module=trainer.task", "--package=mine/trainer", "--labels=team=vision"]
    where = [*WHERE, f"--backend={backend}"]
    shown = typed("submit", "cpu-2workers", *flags, *where, "--", *words)
    assert "ships trainer/ (3): 3 files, 0.0 MB\n" in shown
    job = vertex.job
    assert job["labels"]["team"] == "vision"
    assert job["displayName"].startswith("trainer-task-cpu-2workers-")
    for worker in ("workerpool0-0", "workerpool1-0"):
        assert f"  {worker}  words {words} mine True\n" in shown
        for name in ("deploy", "in_job", "bootstrap"):
            assert shown.count(f"  {worker}  no {name}\n") == 1
    folder = str(output_of(job)).removeprefix("gs://").rstrip("/")
    stats = [json.loads(line) for line in vertex.objects[f"{folder}/stats.jsonl"].splitlines()]
    assert [line["step"] for line in stats] == [10, 20, 30]
    assert json.loads(vertex.objects[f"{folder}/result.json"])["state"] == "done"
    job["state"] = "JOB_STATE_RUNNING"
    assert "step 30" in typed("jobs", "--region=us-central1")
    job["state"] = "JOB_STATE_SUCCEEDED"


def test_the_spec_of_a_scripts_job_does_not_train_a_recipe_here(typed: Command) -> None:
    script("print('trains')")
    flags = ["--script=mine/train.py", *WHERE, "--project=p"]
    Path("spec.yaml").write_text(typed("submit", "--spec", "cpu", *flags))
    line = "spec: a script's job, whose code is in the bucket: name the code: --script=FILE"
    assert line in typed("local", "spec.yaml", code=2)


def test_numbers_that_cannot_be_written_end_no_script(vertex: Emulator, typed: Command) -> None:
    """The job's account may not write to the bucket: that is said once."""
    script(REPORTS + "\nprint('reaches its end')")
    runs = vertex.run

    def refuses(google: Emulator, job: Job) -> None:
        google.faults.append(Fault("POST /upload/", 403, times=1000))
        runs(google, job)

    vertex.run = refuses
    shown = typed("submit", "cpu", "--script=mine/train.py", *WHERE, "--backend=sdk")
    assert "reaches its end" in shown
    line = "the numbers of this script cannot be kept in its job directory: status 403"
    assert shown.count(line) == 1


def test_jobs_of_a_script_are_compared(vertex: Emulator, target: list[str], typed: Command) -> None:
    """Each job's numbers come back from the bucket, with the money of its tier."""
    script(REPORTS)
    flags = ["--script=mine/train.py", *target, "--backend=sdk", "--max_cost=5"]
    command = ["compare", "cpu", "cpu-2workers", *flags]
    assert "ships train.py: 1 file, 0.0 MB" in typed(*command, "--dry_run")
    assert re.search(r"(?m)buy .* s a run", typed(*command).lower())
    cpu, two = rows()
    assert cpu.state == two.state == "done"
    assert two.devices == 2
    assert two.simulated == ""
    assert cpu.final_loss == 1 / 8
    assert two.cost == pytest.approx(two.price_per_hour * two.total_seconds / 3600)
