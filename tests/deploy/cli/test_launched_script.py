"""Tests a script that calls `fit`, from the desk: what goes along, the check before sending, here
and as a job."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from deploy.job import script as tried
from deploy.job.options import JobOptions
from deploy.job.script import read_script
from tests.deploy.conftest import ROOT, WHERE, Command, error_of, run, start_of, task_of
from tests.deploy.planted import content, write_files
from tests.fixtures import Capture, Patch

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
def test_a_script_trains_here_with_only_what_goes_along(churn: Path, typed: Command) -> None:
    """With Keras's own numbers on two workers; the file whose name stands nowhere is found by the
    check."""
    words = ["--epochs=3", "--found=found.json"]
    assert run([sys.executable, churn.name, *words], cwd=churn.parent).returncode == 0
    expected = content(churn.parent / "found.json")
    (churn.parent / "found.json").unlink()
    flags = ["--job_dir=runs/a", "--checkpoint_every_steps=3"]
    shown = typed("local", "cpu-2workers", f"--script={churn}", *flags, "--", *words)
    code = Path("runs/a/code")
    files = {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} == {*TRAVELS, "found.json"}
    found = content(code / "found.json")
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert content("runs/a/result.json")["steps"] == 15
    assert "churn/train.py opens limits_of_columns.json, which goes along" in shown
    assert "train.py --epochs=3 --found=found.json: it calls fit (--as_is" in shown


def test_a_job_of_a_script_installs_the_trainer_and_what_the_script_imports(
    churn: Path, typed: Command
) -> None:
    """Whose own TensorFlow wins, if a file lists one."""
    churn.write_text("import matplotlib\n" + churn.read_text())
    flags = [*WHERE, "--project=p", "--no_check", "--spec", "--precision", "mixed_bfloat16"]
    for listed, expected in (
        ("", ["tensorflow[and-cuda]==", "keras==", "matplotlib>="]),
        (
            "tensorflow==2.20.0\nmatplotlib\n",
            ["tensorflow[and-cuda]", "keras==", "tensorflow==2.20.0", "matplotlib"],
        ),
        (
            "--pre\nmatplotlib\n",
            ["tensorflow[and-cuda]==", "keras==", "-r", "requirements.txt"],
        ),
    ):
        if listed:
            (churn.parent / "requirements.txt").write_text(listed)
        spec = yaml.safe_load(typed("submit", "l4x1", f"--script={churn}", *flags))
        start = start_of(task_of(spec))
        assert all(map(str.startswith, start["requirements"], expected))
        assert start["module"] == "trainer.launch"
        assert start["packages"][0][0].startswith("gs://my-bucket/packages/vertex_trainer-")
        words = ["--expect_devices=1", "--precision=mixed_bfloat16", "train.py"]
        assert task_of(spec)["args"] == words


NEEDS = "import importlib, json, time, keras, tensorflow as tf\n{}\nkeras.Sequential([]).fit(1)\n"


@SLOW
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("importlib.import_module('help' + 'er')", "it needs helper.py, which does not go along "),
        (
            "importlib.import_module('matplot' + 'lib')",
            "it imports matplotlib, which the job would not have: ",
        ),
        (
            "tf.io.gfile.copy('tab' + 'le.csv', 'there')",
            "needs table.csv, which does not go along (NotFound",
        ),
        ("open('tabel.csv')", "directory: 'tabel.csv'; did you mean 'table.csv'?: so would its"),
        (
            "import argparse, sys; sys.argv += ['--epochz=3'];"
            " argparse.ArgumentParser().parse_args()",
            "by SystemExit: 2 (train.py: error: unrecognized arguments: --epochz=3): so would",
        ),
    ],
)
def test_what_a_job_would_lack_is_refused_before_it_is_sent(line: str, told: str) -> None:
    write_files({"train.py": NEEDS.format(line), "helper.py": "", "table.csv": "1"})
    error = error_of(lambda: read_script(JobOptions(script="train.py"), [], {}).sources)
    assert error.startswith("script=train.py: ")
    assert told in error


STEP = """
import keras, numpy as np
from keras import ops

def loss(y, p):
    return {}

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", loss)
model.fit(np.ones((64, 3)), np.arange(64.0), batch_size={})
"""


@SLOW
@pytest.mark.parametrize(
    ("loss", "batch", "code", "told"),
    [
        ("ops.mean((y - p) ** 2)", 16, 0, "train.py: proved: every update is what one"),
        (
            "ops.max((y - p) ** 2)",
            16,
            2,
            "train.py:6: return ops.max((y - p) ** 2): Max is over the",
        ),
        ("ops.mean((y - p) ** 2)", 10, 2, "batch_size=10 does not divide over 4 replicas"),
        ("none.loss(y)", 16, 2, "by NameError: name 'none' is not defined: so would its job: mend"),
        ("open('/gcs/b/x')", 16, 0, "'/gcs/b/x': it is not checked further"),
    ],
)
def test_the_step_of_a_script_is_proved_before_several_gpus_are_paid_for(
    loss: str, batch: int, code: int, told: str, typed: Command
) -> None:
    write_files({"train.py": STEP.format(loss, batch)})
    flags = ["--script=train.py", *WHERE, "--project=p", "--max_cost=5", "--dry_run"]
    assert told in typed("submit", "l4x4", *flags, code=code)
    assert "proved" not in typed("submit", "l4x1", *flags)


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
            "before it called fit, by URLError: <urlopen error the check before sending starts",
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
    line: str, told: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """It writes nothing outside of its copy, where the script lies as it is."""
    monkeypatch.setattr(tried, "CHECK_S", 6.0 if "sleep" in line else 60.0)
    kept = tmp_path / "kept"
    Path("train.py").write_text(NEEDS.format(line.format(kept=str(kept))))
    Path("far_away.json").write_text("1")
    before = set(os.listdir())
    files = read_script(JobOptions(script="train.py"), [], {}).sources.files
    assert told in capsys.readouterr().out
    assert not kept.exists()
    assert set(os.listdir()) == before
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
def test_a_package_trains_here_from_a_copy_of_what_goes_along(typed: Command) -> None:
    write_files({"src/mine.py": MINE, "other.py": ""})
    flags = [
        "--model=mine:build",
        "--data=mine:data",
        "--steps=2",
        "--global_batch_size=8",
        "--job_dir=runs/p",
    ]
    assert f"from {Path('runs/p/code/mine.py').absolute()} None" in typed(
        "local", "cpu", "--package=src/mine.py", *flags
    )
