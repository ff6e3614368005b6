"""Tests a script of the user's own on this machine and on Vertex AI: what it finds, its numbers,
its ends."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.__main__ import main
from deploy.cli import compare, jobs, submit
from deploy.job.options import JobOptions
from deploy.job.script import read_script
from deploy.job.workload import ScriptRun
from deploy.platform import local as processes
from deploy.platform.gcloud_and_sdk import Session
from deploy.platform.local import LocalJob, local_workers
from deploy.report.collection import collect
from deploy.report.measures import summarize
from deploy.tiers.tier import load_tier
from tests.deploy.conftest import ROOT, WHERE, Capture, Job, is_alive, needs_gcloud, run
from tests.deploy.emulator import Emulator, Fault
from tests.workers import until
from trainer.base.storage.local_files import Address

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
found |= {"path": sys.path, "folder": os.getcwd()}
with open(os.environ["RANK"], "w") as file:
    json.dump(found, file)
os.rename(os.environ["RANK"], os.environ["RANK"] + ".json")
while os.environ["RANK"] == "0" and not os.path.exists("1.json"):  # the job ends with its chief
    time.sleep(0.02)
"""


def script(text: str, name: str = "train.py") -> Path:
    """Writes a script below the working folder."""
    path = Path("mine", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def result(folder: str = "runs/a") -> dict[str, Any]:
    return json.loads(Path(folder, "result.json").read_text())


def local(tier: str, *more: str) -> int:
    return main(["local", tier, "--script=mine/train.py", "--job_dir=runs/a", *more])


def test_a_script_finds_what_vertex_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments are intact, and one file of ours is on its path."""
    script(FINDS)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}/elsewhere")
    words = ["--name", "two words", "\"q'", "", "$HOME *", "--", "--steps=3"]
    assert local("cpu-2workers", "--", *words) == 0
    for rank in (0, 1):
        found = json.loads(Path(f"runs/a/code/{rank}.json").read_text())
        variables = found["variables"]
        folder = str(Path("runs/a").absolute())
        spec = json.loads(variables["CLUSTER_SPEC"])
        config = json.loads(variables["TF_CONFIG"])
        assert (found["words"], found["folder"]) == (words, f"{folder}/code")
        assert spec["task"] == {"type": f"workerpool{rank}", "index": 0}
        assert config["task"]["type"] == ("worker" if rank else "chief")
        assert [*config["cluster"].values()] == [*spec["cluster"].values()]
        assert (
            f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
            == spec["cluster"]["workerpool0"][0]
        )
        assert (variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("2", "0")
        assert variables["AIP_MODEL_DIR"] == f"{folder}/model/"
        assert variables["CLOUD_ML_JOB_ID"].startswith("local-")
        assert not [name for name in variables if name.startswith("TRAINER_")]
        assert variables["PYTHONPATH"].split(os.pathsep)[1:] == ["/elsewhere"]
        assert "vertex_report.py" in os.listdir(found["path"][1])


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


KERAS = """
import keras
import numpy as np
from vertex_report import report


class Report(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        report(step=self.params["steps"] * (epoch + 1), **logs)


keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
model.fit(x, x.sum(axis=1), batch_size=32, epochs=4, validation_split=0.25, callbacks=[Report()])
"""


@pytest.mark.slow
def test_a_script_with_fit_has_the_numbers_of_a_recipe() -> None:
    """As the examples of keras.io are written, with its progress bar."""
    script(KERAS)
    assert local("cpu") == 0
    lines = [json.loads(line) for line in Path("runs/a/stats.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [6, 12, 18, 24]
    assert [set(line["losses"]) for line in lines] == [{"loss", "val_loss"}] * 4
    assert lines[-1]["losses"]["loss"] < lines[0]["losses"]["loss"]
    assert result()["final"]["metrics"].keys() == {"mae", "val_mae"}


def test_a_report_outside_a_job_is_printed() -> None:
    code = "from vertex_report import report; report(step=3, loss=0.5)"
    importable = {
        "PYTHONPATH": str(ROOT / "deploy" / "in_job" / "importable"),
        "PATH": os.environ["PATH"],
    }
    assert run([sys.executable, "-c", code], env=importable).stdout == '{"step": 3, "loss": 0.5}\n'


@pytest.mark.parametrize(
    ("ends", "code"),
    [("sys.exit(7)", 7), ("raise ValueError", 1), ("os.kill(os.getpid(), 9)", 137)],
)
def test_the_exit_code_is_its_own(ends: str, code: int, capsys: Capture) -> None:
    script(f"import os, sys\nprint('begins')\n{ends}")
    assert local("cpu") == code
    found = result()
    assert (found["state"], found["exit_code"], found["steps"], found["wall_seconds"] > 0) == (
        "failed",
        code,
        0,
        True,
    )
    assert found["error"].startswith(f"train.py exited with status {code}: ")
    assert f"exited with a non-zero status of {code}." in capsys.readouterr().err


def test_it_is_restarted_as_vertex_does_and_its_time_is_counted(capsys: Capture) -> None:
    script(
        "import os, sys\nfirst = not os.path.exists('began')\nopen('began', 'w')\nsys.exit(3 *"
        " first)"
    )
    assert local("cpu", "--restarts=1") == 0
    assert (result()["state"], result()["restarts"]) == ("done", 1)
    assert "exited with status 3: restart 1 of 1" in capsys.readouterr().out


def test_a_script_that_hangs_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores SIGTERM, and has a process of its own."""
    monkeypatch.setattr(processes, "EXIT_TIMEOUT_S", 0.3)
    path = script(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nchild ="
        " os.fork()\nif child: print('pids', os.getpid(), child)\ntime.sleep(300)"
    )
    said: list[str] = []
    tier = load_tier("cpu")
    folder = tmp_path / "job"
    program = ScriptRun(tier, read_script(JobOptions(script=str(path)), [], {})).local_program(
        folder
    )
    job = LocalJob(local_workers(tier, [], folder, "local-1", program=program), print)

    def say(name: str, line: str) -> None:
        said.append(line)
        if line.startswith("pids"):
            job.stop()

    job.print_line = say
    assert job.run().state == "CANCELLED"
    pids = [pid for line in said if line.startswith("pids") for pid in line.split()[1:]]
    assert len(pids) == 2
    until(lambda: not any(map(is_alive, pids)), 10)


def test_a_script_without_numbers_has_time_and_state(capsys: Capture) -> None:
    script("print('trains')")
    assert (
        main(
            ["compare", "cpu", "--script=mine/train.py", "--out=runs/c", "--price_per_hour=cpu=3.6"]
        )
        == 0
    )
    (row,) = summarize(collect(["runs/c"]), usd_by_tier={"cpu": 3.6})
    assert (row.state, row.steps, row.images_per_second) == ("done", 0, None)
    assert row.total_seconds == result("runs/c/cpu/repeat-1")["wall_seconds"]
    assert row.cost == pytest.approx(0.001 * row.total_seconds)
    assert "stats.jsonl is missing" in capsys.readouterr().out


def test_two_tiers_are_compared_as_those_of_a_recipe(capsys: Capture) -> None:
    """tests/deploy/report/test_summary.py computes each cell again from such files."""
    script(REPORTS)
    prices = ["--price_per_hour=cpu=3.6", "--price_per_hour=l4x2=7.2"]
    command = [
        "compare",
        "cpu",
        "l4x2",
        "--script=mine/train.py",
        "--out=runs/c",
        *prices,
        "--",
        "two words",
    ]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "runs python train.py 'two words', as it is: it calls no fit of Keras\n"
    )
    cpu, simulated = summarize(collect(["runs/c"]), usd_by_tier={"cpu": 3.6, "l4x2": 7.2})
    assert (cpu.steps, cpu.final_loss, cpu.final_accuracy) == (80, 1 / 8, 1.0)
    assert cpu.cost == pytest.approx(cpu.total_seconds * 3.6 / 3600)
    assert (cpu.simulated, simulated.simulated, simulated.cost) == (
        "",
        "NVIDIA_L4 simulated on a CPU",
        None,
    )
    assert "steps/s" in shown
    assert "global batch is the same" not in shown, "nobody knows"
    assert main(command) == 0
    assert capsys.readouterr().out.count(": done before") == 2
    assert main([*command[:-1], "other"]) == 2
    assert (
        "holds another comparison (arguments: 'two words' stored, other given)"
        in capsys.readouterr().err
    )


OWN_TRAINER = """
import sys
import trainer
from trainer import helper
from vertex_report import report
print("words", sys.argv[1:], helper.NAME, trainer.__file__.endswith("code/trainer/__init__.py"))
for name in ("deploy", "in_job", "starter"):
    try:
        __import__(name)
    except ImportError:
        print("no", name)
for step in (10, 20, 30):
    report(step=step, loss=1 / step)
"""


@pytest.mark.parametrize("backend", [pytest.param("gcloud", marks=needs_gcloud), "sdk"])
def test_a_package_called_trainer_runs_on_two_workers(
    backend: str, vertex: Emulator, session: Session, capsys: Capture
) -> None:
    """As in Google's samples. Its numbers are in the bucket, and `jobs` shows them."""
    for name, text in {
        "task.py": OWN_TRAINER,
        "helper.py": "NAME = 'mine'",
        "__init__.py": "",
    }.items():
        script(text, f"trainer/{name}")
    words = ["two words", '"q"', "", "--epochs=3"]
    flags = [
        "--module=trainer.task",
        "--package=mine/trainer",
        *WHERE,
        f"--backend={backend}",
        "--labels=team=vision",
    ]
    assert submit.main(["cpu-2workers", *flags, "--", *words], session) == 0
    shown = capsys.readouterr().out
    assert "ships trainer/ (3): 3 files, 0.0 MB\n" in shown
    (job,) = vertex.jobs.values()
    assert job["labels"]["team"] == "vision"
    assert job["displayName"].startswith("trainer-task-cpu-2workers-")
    for worker in ("workerpool0-0", "workerpool1-0"):
        assert f"  {worker}  words {words} mine True\n" in shown
        assert [
            shown.count(f"  {worker}  no {name}\n") for name in ("deploy", "in_job", "starter")
        ] == [1, 1, 1]
    folder = job["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"].removeprefix("gs://")
    stats = [json.loads(line) for line in vertex.objects[f"{folder}/stats.jsonl"].splitlines()]
    assert [line["step"] for line in stats] == [10, 20, 30]
    assert json.loads(vertex.objects[f"{folder}/result.json"])["state"] == "done"
    job["state"] = "JOB_STATE_RUNNING"
    assert jobs.run_jobs([f"--backend={backend}", "--region=us-central1"], session) == 0
    assert "step 30" in capsys.readouterr().out
    job["state"] = "JOB_STATE_SUCCEEDED"


def test_the_spec_of_a_scripts_job_does_not_train_a_recipe_here(capsys: Capture) -> None:
    script("print('trains')")
    assert main(["submit", "--spec", "cpu", "--script=mine/train.py", *WHERE, "--project=p"]) == 0
    Path("spec.yaml").write_text(capsys.readouterr().out)
    assert main(["local", "spec.yaml"]) == 2
    assert (
        "spec: a script's job, whose code is in the bucket: name the code: --script=FILE"
        in capsys.readouterr().err
    )


def test_numbers_that_cannot_be_written_end_no_script(
    vertex: Emulator, session: Session, capsys: Capture
) -> None:
    """The job's account may not write to the bucket: that is said once."""
    script(REPORTS + "\nprint('reaches its end')")
    runs = vertex.run

    def refuses(google: Emulator, job: Job) -> None:
        google.faults.append(Fault("POST /upload/", 403, times=1000))
        runs(google, job)

    vertex.run = refuses
    assert submit.main(["cpu", "--script=mine/train.py", *WHERE, "--backend=sdk"], session) == 0
    shown = capsys.readouterr().out
    assert "reaches its end" in shown
    assert (
        shown.count("the numbers of this script cannot be kept in its job directory: status 403")
        == 1
    )


def test_jobs_of_a_script_are_compared(
    vertex: Emulator,
    session: Session,
    target: list[str],
    bucket: Address,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    """Each job's numbers come back from the bucket, with the money of its tier."""
    script(REPORTS)
    command = [
        "cpu",
        "cpu-2workers",
        "--script=mine/train.py",
        *target,
        "--backend=sdk",
        "--max_cost=5",
    ]
    assert compare.main([*command, "--dry_run"], session) == 0
    assert "ships train.py: 1 file, 0.0 MB" in capsys.readouterr().out
    assert compare.main(command, session) == 0
    cpu, two = summarize(collect([str(tmp_path / "out")]))
    assert (cpu.state, two.state, two.devices, two.simulated, cpu.final_loss) == (
        "done",
        "done",
        2,
        "",
        1 / 8,
    )
    assert two.cost == pytest.approx(two.price_per_hour * two.paid_seconds / 3600)
    assert re.search(r"(?m)buy .* s a run", capsys.readouterr().out.lower())
