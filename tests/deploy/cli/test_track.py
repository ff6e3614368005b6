"""Tests comparisons in MLflow, and what `submit` prepares for a job's trackers."""

import json
from pathlib import Path

import pytest
import yaml

from deploy.__main__ import main
from deploy.job.workload import check_trackers
from deploy.packaging.image_choice import Image
from tests.deploy.conftest import (
    JOB,
    WHERE,
    Capture,
    Command,
    error_of,
    start_of,
    task_of,
    variables_of,
)
from tests.deploy.planted import edit, write_files
from tests.trainer.base.run_files.tracking.runs import (
    mlflow_files,
    mlflow_history,
    mlflow_runs,
    plant_run,
)
from trainer.base.run_files.job_files import write_json
from trainer.base.storage import lock_folder

# MLflow's
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed here")
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def test_a_comparison_is_a_parent_with_a_child_for_each_repeat(store: str, typed: Command) -> None:
    out = Path("out")
    for number, run in enumerate(("l4x1/repeat-1", "l4x1/repeat-2", "l4x4/repeat-1")):
        edit(plant_run(out / run) / "run.json", id=f"run{number}")
    bill = {"7": {"usd": 0.3}, "8": {"usd": 0.04}}
    write_json(out / "l4x4" / "repeat-1" / "billed.json", {"jobs": bill})
    tiers = [{"name": name, "machine_type": "x"} for name in ("l4x1", "l4x4")]
    asked = {"on": "vertex", "tiers": tiers, "flags": ["--steps=30"], "command": "compare x"}
    write_json(out / "comparison.json", asked)
    table = [
        {"tier": "l4x1", "repeats": 2, "images_per_second": {"median": 9.0}, "final_loss": None},
        {"tier": "l4x4", "repeats": 1, "speed_up": 3.5},
    ]
    verdict = ["l4x1 is cheaper.", "The losses agree."]
    write_json(out / "table.json", {"tiers": table, "verdict": verdict})
    write_files(dict.fromkeys(("table.md", "report.html"), "| tier |\n\n- A note."), out)
    for _ in range(2):
        shown = typed("track", "out", f"--track=mlflow:{store}#compared")
    runs = {run.info.run_name: run for run in mlflow_runs(store, "compared")}
    assert sorted(runs) == ["l4x1/repeat-1", "l4x1/repeat-2", "l4x4/repeat-1", "out"]
    parent = runs.pop("out")
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    assert mlflow_files(store, parent) == ["report.html", "table.md"]
    assert parent.data.metrics == {"l4x1/images_per_second": 9.0, "l4x4/speed_up": 3.5}
    note = "- l4x1 is cheaper.\n- The losses agree.\n\n| tier |"
    assert parent.data.tags["mlflow.note.content"] == note
    assert parent.data.tags["verdict"] == "l4x1 is cheaper."
    assert parent.data.params["flags"] == "['--steps=30']"
    assert mlflow_history(store, runs["l4x4/repeat-1"], "result/usd") == [(30, pytest.approx(0.34))]
    assert "result/usd" not in runs["l4x1/repeat-1"].data.metrics  # of which no bill is known
    assert "l4x4/repeat-1: finished, 0 steps sent" in shown


def test_compare_sends_its_runs_at_the_end(command: Command, store: str) -> None:
    assert "l4x1/repeat-1: finished, 21 steps sent" in command(
        "l4x1", f"--track=mlflow:{store}#sent"
    )
    assert [run.info.run_name for run in mlflow_runs(store, "sent")] == ["out", "l4x1/repeat-1"]


def test_a_run_that_goes_on_is_refused(refused: Command) -> None:
    lock_folder(plant_run(Path("run")), "job_dir", "run")
    assert "run: the run is not done: give it --track, or wait for its end" in refused(
        "track", "run", "--track=wandb:x"
    )


def test_what_an_image_lacks_is_refused() -> None:
    image = Image("us-docker.pkg.dev/p/r/x:1", built=True)
    assert "the job's image has no wandb" in error_of(check_trackers, ["wandb:x"], image, [])


def test_a_job_installs_and_knows_what_its_trackers_need(capsys: Capture) -> None:
    flags = [
        "--track=mlflow:https://mlflow.example.org#tests,wandb:x,vertex:x",
        "--tensorboard_instance=7",
        "--service_account=trainer@my-proj.iam.gserviceaccount.com",
    ]
    assert main(["submit", "--spec", "l4x1", "--project=my-proj", *WHERE, *JOB, *flags]) == 0
    spec, warned = capsys.readouterr()
    assert warned.count("the job gets no login: add --secret=") == 2
    task = task_of(yaml.safe_load(spec))
    known = variables_of(task)
    board = "projects/my-proj/locations/us-central1/tensorboards/7"
    assert yaml.safe_load(spec)["tensorboard"] == board
    assert known["TRAINER_TENSORBOARD"] == board
    assert {"mlflow-skinny", "wandb"} <= {*start_of(task)["requirements"]}
    tags = json.loads(known["TRAINER_TAGS"])
    assert tags["tier"] == "l4x1"
    assert tags["image"] == task["imageUri"]
    assert tags["usd_per_hour"] > 0
    assert known["CLOUDSDK_CORE_PROJECT"] == "my-proj"
    assert known["CLOUDSDK_AI_REGION"] == "us-central1"
