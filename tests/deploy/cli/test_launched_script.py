"""Tests a script that calls `fit`, from the desk: what goes along, the check before sending, here
and as a job."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from deploy.__main__ import main
from deploy.cli import submit
from deploy.job import script as tried
from deploy.job.options import JobOptions
from deploy.job.script import read_script
from deploy.platform.gcloud_and_sdk import Session
from tests.deploy.cli.conftest import runs_spec
from tests.deploy.conftest import ROOT, WHERE, Capture, Command, error_of, run
from tests.deploy.emulator import Emulator

CHURN = ROOT / "tests" / "scripts" / "churn"
TRAVELS = {"train.py", "columns.py", "data/churn.csv", "limits_of_columns.json"}
SLOW = pytest.mark.slow


@pytest.fixture
def churn() -> Path:
    """Returns a copy of the script's folder, in which something else lies, too."""
    shutil.copytree(CHURN, "churn", ignore=shutil.ignore_patterns("__pycache__"))
    Path("churn/photos.bin").write_text("large")
    return Path("churn/train.py")


def test_a_plan_of_a_script_is_told_what_to_do_instead(refused: Command) -> None:
    line = refused("plan", "l4x1", "--script=train.py")
    assert "plan knows recipes: what a script needs is known once it runs: measure it by" in line


@SLOW
def test_a_script_trains_here_with_only_what_goes_along(churn: Path, capsys: Capture) -> None:
    """With Keras's own numbers on two workers; the file whose name stands nowhere is found by the
    check."""
    words = ["--epochs=3", "--found=found.json"]
    assert run([sys.executable, churn.name, *words], cwd=churn.parent).returncode == 0
    expected = json.loads((churn.parent / "found.json").read_text())
    (churn.parent / "found.json").unlink()
    flags = ["--job_dir=runs/a", "--checkpoint_every_steps=3"]
    assert main(["local", "cpu-2workers", f"--script={churn}", *flags, "--", *words]) == 0
    code = Path("runs/a/code")
    files = {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} == {*TRAVELS, "found.json"}
    found = json.loads((code / "found.json").read_text())
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert json.loads(Path("runs/a/result.json").read_text())["steps"] == 15
    shown = capsys.readouterr().out
    assert "churn/train.py opens limits_of_columns.json, which goes along" in shown
    assert (
        "train.py --epochs=3 --found=found.json: it calls fit (--as_is runs it as it is)\n" in shown
    )


@SLOW
def test_a_script_trains_as_a_job(
    churn: Path, cloud: Emulator, session: Session, tmp_path: Path, capsys: Capture
) -> None:
    """In an image with this package, in a folder that has what went along."""
    cloud.accounts = {"": "me@my-proj.test", "not-a-secret": "me@my-proj.test"}
    cloud.run = lambda google, job: runs_spec(google, job, Path(sys.executable), tmp_path)
    flags = [
        "--image=us-docker.pkg.dev/p/r/x:1",
        f"--env=PYTHONPATH={ROOT}",
        "--backend=sdk",
        "--seed=5",
    ]
    assert (
        submit.main(["cpu", f"--script={churn}", *WHERE, *flags, "--", "--epochs=2"], session) == 0
    )
    shown = capsys.readouterr().out
    assert (
        "runs python -m trainer.launch --seed=5 train.py --epochs=2: it calls fit (--as_is runs it"
        " as it is)" in shown
    )
    assert "ships columns.py, data/ (1), limits_of_columns.json, train.py: 4 files" in shown
    (job,) = cloud.jobs.values()
    folder = job["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"].removeprefix("gs://")
    result = json.loads(cloud.objects[f"{folder}/result.json"])
    assert (result["state"], result["steps"]) == ("done", 10)
    assert f"{folder}/model/model.keras" in cloud.objects


def test_a_job_of_a_script_installs_the_trainer_and_what_the_script_imports(
    churn: Path, capsys: Capture
) -> None:
    """Whose own TensorFlow wins, if a file lists one."""
    churn.write_text("import matplotlib\n" + churn.read_text())
    command = [
        "submit",
        "l4x1",
        f"--script={churn}",
        *WHERE,
        "--project=p",
        "--no_check",
        "--spec",
        "--precision",
    ]
    for listed, expected in (
        ("", ["tensorflow[and-cuda]==", "keras==", "matplotlib>="]),
        (
            "tensorflow==2.20.0\nmatplotlib\n",
            ["tensorflow[and-cuda]", "keras==", "-r", "requirements.txt"],
        ),
    ):
        (churn.parent / "requirements.txt").write_text(listed)
        (churn.parent / "requirements.txt").unlink() if not listed else None
        assert main([*command, "mixed_bfloat16"]) == 0
        text = capsys.readouterr().out
        start = json.loads(
            text.partition("name: TRAINER_START\n")[2].partition("value: '")[2].partition("'\n")[0]
        )
        assert [*map(str.startswith, start["requirements"], expected)] == [True] * len(expected)
        assert start["module"] == "trainer.launch"
        assert start["packages"][0][0].startswith("gs://my-bucket/packages/vertex_trainer-")
        assert "--expect_devices=1 --precision=mixed_bfloat16 train.py" in " ".join(
            text.replace(" - ", " ").split()
        )


NEEDS = "import importlib, json, time, keras, tensorflow as tf\n{}\nkeras.Sequential([]).fit(1)\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        pytest.param(
            "importlib.import_module('help' + 'er')",
            "it needs helper.py, which does not go along "
            "(ModuleNotFoundError: No module named 'helper'): add --include=helper.py",
            marks=SLOW,
        ),
        pytest.param(
            "importlib.import_module('matplot' + 'lib')",
            "it imports matplotlib, which the job would not have: "
            "write requirements.txt beside it with the lines matplotlib>=",
            marks=SLOW,
        ),
        pytest.param(
            "tf.io.gfile.copy('tab' + 'le.csv', 'there')",
            "needs table.csv, which does not go along (NotFound",
            marks=SLOW,
        ),
        pytest.param(
            "open('none.csv')",
            "No such file or directory: 'none.csv': so would its job: mend it",
            marks=SLOW,
        ),
        pytest.param(
            "import argparse, sys; sys.argv += ['--epochz=3'];"
            " argparse.ArgumentParser().parse_args()",
            "by SystemExit: 2 (train.py: error: unrecognized arguments: --epochz=3): so would"
            " its job",
            marks=SLOW,
        ),
    ],
)
def test_what_a_job_would_lack_is_refused_before_it_is_sent(line: str, told: str) -> None:
    for name, text in {"train.py": NEEDS.format(line), "helper.py": "", "table.csv": "1"}.items():
        Path(name).write_text(text)
    error = error_of(lambda: read_script(JobOptions(script="train.py"), [], {}).sources)
    assert error.startswith("script=train.py: ")
    assert told in error


@SLOW
@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "open({kept!r}, 'w')",
            "ended here before it called fit, by PermissionError: the check before sending writes",
        ),
        (
            "import urllib.request as u; u.urlopen('http://127.0.0.1:1')",
            (
                "before it called fit, by URLError: <urlopen error the check before sending starts"
                " and reaches no other program>: it is not checked further"
            ),
        ),
        ("time.sleep(90)", "did not reach fit in 6 s: it is not checked further"),
        (
            "json.load(open('_'.join(['far', 'away.json'])))",
            "train.py opens far_away.json, which goes along",
        ),
        (
            "tf.data.TFRecordDataset(['_'.join(['far', 'away.json'])])",
            "train.py opens far_away.json, which goes along",
        ),
    ],
)
def test_what_the_check_does_not_know_is_said_and_sent(
    line: str, told: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes nothing outside of its copy, where the script lies as it is."""
    monkeypatch.setattr(tried, "CHECK_S", 6.0 if "sleep" in line else 60.0)
    kept = tmp_path / "kept"
    Path("train.py").write_text(NEEDS.format(line.format(kept=str(kept))))
    Path("far_away.json").write_text("1")
    before = set(os.listdir())
    files = read_script(JobOptions(script="train.py"), [], {}).sources.files
    assert told in capsys.readouterr().out
    assert (kept.exists(), set(os.listdir())) == (False, before)
    assert files.keys() == {"train.py", "far_away.json"} if "far" in line else {"train.py"}


MINE = """
import importlib.util
import keras
import numpy as np

def data(config):
    print("from", __file__, importlib.util.find_spec("other"))
    return np.ones((32, 3), "float32"), np.ones((32, 1), "float32")

def build(config, dataset):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
"""


@SLOW
def test_a_package_trains_here_from_a_copy_of_what_goes_along(capsys: Capture) -> None:
    Path("src").mkdir()
    Path("src/mine.py").write_text(MINE)
    Path("other.py").write_text("")
    flags = [
        "--model=mine:build",
        "--data=mine:data",
        "--steps=2",
        "--global_batch_size=8",
        "--job_dir=runs/p",
    ]
    assert main(["local", "cpu", "--package=src/mine.py", *flags]) == 0
    assert f"from {Path('runs/p/code/mine.py').absolute()} None" in capsys.readouterr().out
