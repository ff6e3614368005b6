"""Tests the audit of a run: which stretches there are, how surely a forged one is found, and one trained again."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.fixtures import Capture
from tests.support import fresh_collectives, run_job
from tests.trainer.data.test_user_data import settings
from tests.trainer.proofs.test_golden import FLAGS, MODEL
from trainer import audit
from trainer.base.errors import DONE, USER_MUST_CHANGE
from trainer.base.settings.resolution import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.data.dataset import Dataset
from trainer.proofs.reordering import reordered
from trainer.proofs.stretches import Stretch, broken_links, chosen, manifests, stretches
from trainer.run.training_setup import build_setup
from trainer.training.checkpoint import read_checkpoint, write_checkpoint
from trainer.training.state import snapshot, variables_of

ROOT = Path(__file__).parents[3]


def chain(*steps: int) -> dict[int, dict[str, Any]]:
    """Returns manifests of which each names the one before."""
    kept: dict[int, dict[str, Any]] = {}
    before = None
    for step in steps:
        kept[step] = {"sha256": f"digest-{step}", "previous": before}
        before = {"step": step, "sha256": f"digest-{step}"}
    return kept


def test_stretches_lie_between_checkpoints_that_follow_each_other() -> None:
    kept = chain(10, 20, 30, 40)
    assert stretches(kept) == [Stretch(0, 10), Stretch(10, 20), Stretch(20, 30), Stretch(30, 40)]
    del kept[20]
    assert stretches(kept) == [Stretch(0, 10), Stretch(30, 40)]
    assert stretches({50: {"sha256": "of an older version"}}) == []
    assert broken_links(kept) == []


def test_a_replaced_checkpoint_breaks_the_chain() -> None:
    kept = chain(10, 20, 30)
    kept[20]["sha256"] = "forged"
    assert broken_links(kept) == ["step-00000030 follows another step-00000020 than the one that is kept"]
    assert stretches(kept) == [Stretch(0, 10), Stretch(10, 20)]


def test_a_forged_stretch_is_found_as_often_as_is_promised() -> None:
    every = [Stretch(10 * at, 10 * at + 10) for at in range(20)]
    draws = random.Random(0)
    hits = [every[draws.randrange(20)] in chosen(every, 5, seed) for seed in range(200)]
    assert abs(sum(hits) / 200 - 0.25) < 3 * (0.25 * 0.75 / 200) ** 0.5
    assert chosen(every, 3, 1) == chosen(every, 3, 1) != chosen(every, 3, 2)
    assert chosen(every, 99, 1) == every


@pytest.mark.parametrize(("words", "line"), [
    (["missing", "--seed=1"], "error: missing is not the job directory of a run"),
    (["missing"], "error: the following arguments are required: --seed"),
    (["missing", "--seed=1", "--segments=0"], "error: argument --segments: '0' is not a whole number from 1 to"),
])  # fmt: skip
def test_a_mistake_is_one_line(words: list[str], line: str, capsys: Capture, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert audit.main(words) == USER_MUST_CHANGE
    told = capsys.readouterr().err
    assert told.startswith(line)
    assert len(told.splitlines()) == 1


class Masked(keras.layers.Layer):
    """Sets rows to 0 at random; what it gives has a first axis of unknown size."""

    def build(self, shape: Any) -> None:
        self.draws = keras.random.SeedGenerator(5)

    def call(self, x: Any, training: bool = False) -> Any:
        drawn = keras.random.uniform((keras.ops.shape(x)[0], 1), seed=self.draws)
        return keras.ops.where(drawn < 0.5, keras.ops.zeros_like(x), x) if training else x


def masked(config: TrainConfig, dataset: Dataset) -> keras.Model:
    layers = [Masked(), keras.layers.Dense(8), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(config.learning_rate), loss="mse")
    return model


def test_rows_in_another_order_change_no_more_than_rounding() -> None:
    """Layers draw the same for a row, wherever it stands: else the control would hide what has changed."""
    flags = [f"--model={__name__}:masked", "--data=tests.own_data:arrays", "--precision=float64", "--steps=2"]
    config = resolve([*flags, "--global_batch_size=8", "--learning_rate=0.1"]).config
    weights = []
    for order in (None, 7):
        fresh_collectives()
        setup = build_setup(config, make_replicas(config))
        runner, rows = reordered(setup, order) if order else (setup.step_runner(), setup.rows_from(0))
        runner(rows, 0, 2)
        weights.append(snapshot(variables_of(setup.model)))
    for name, values in weights[0].items():
        np.testing.assert_allclose(weights[1][name], values, rtol=1e-10, atol=1e-12, err_msg=name)


KEPT = ["--tensorboard=false", "--checkpoint_every_steps=2", "--keep_checkpoints=all", "--steps_per_loop=2"]


@pytest.mark.parametrize(("flags", "kind"), [
    pytest.param([], "rounding", marks=pytest.mark.slow), (["--virtual_replicas=2"], "equal bits"),
])  # fmt: skip
def test_a_run_on_two_replicas_is_audited_on_one(
    flags: list[str], kind: str, tmp_path: Path, capsys: Capture
) -> None:  # fmt: skip
    on = ["--precision=float32", "--replicas=2", f"--job_dir={tmp_path}/job", *KEPT, *flags]
    job = run_job(settings("arrays", "regression", *on))
    fresh_collectives()
    assert audit.main([str(job), "--seed=1", "--segments=9", f"--out={tmp_path}/audit.json"]) == DONE
    predicate = json.loads((tmp_path / "audit.json").read_text())["predicate"]
    assert predicate["result"] == "PASSED"
    assert {test.split(": ")[1] for test in predicate["passedTests"]} >= {kind}
    assert kind == "rounding" or len(predicate["passedTests"]) == 4
    capsys.readouterr()
    info = json.loads((job / "run.json").read_text())
    info["config"]["callbacks"] = "tests.user_callbacks:callbacks"
    (job / "run.json").write_text(json.dumps(info))
    assert audit.main([str(job), "--seed=1"]) == USER_MUST_CHANGE
    assert "which may change rates or weights between steps: only a run without can be audited" in (
        capsys.readouterr().err
    )


def run(folder: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run([sys.executable, "-m", module, *words], cwd=folder, env=environment, capture_output=True,
                          text=True, timeout=300)  # fmt: skip


def forge(job: Path, step: int, before: int) -> None:
    """Replaces a checkpoint by one with other weights, whose manifest is in order."""
    folder = job / "checkpoints" / f"step-{step:08d}"
    manifest, values = read_checkpoint(folder)
    name = next(name for name, value in values.items() if value.ndim == 2)
    shutil.rmtree(folder)
    manifest.pop("files")
    write_checkpoint(folder, {**values, name: values[name] * 1.001}, manifest)
    assert manifest["previous"]["step"] == before


@pytest.mark.slow
def test_a_run_is_trained_again_and_a_forged_checkpoint_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    kept = ["--steps=6", "--checkpoint_every_steps=2", "--keep_checkpoints=all", "--global_batch_size=8"]
    done = run(tmp_path, "trainer.task", *FLAGS[:2], *kept, "--job_dir=job")
    assert done.returncode == DONE, done.stderr
    info = json.loads((tmp_path / "job" / "run.json").read_text())
    assert list(info["sources"]) == ["mine.py"]
    assert info["packages"]["keras"]
    honest = run(tmp_path, "trainer.audit", "job", "--seed=3", "--segments=1")
    assert honest.returncode == DONE, honest.stderr
    assert (
        "trains 1 of 3 stretches again, by seed 3: one forged stretch is found with probability 33 %" in honest.stdout
    )
    assert "equal bits" in honest.stdout
    statement = json.loads((tmp_path / "audit.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicate"]["result"] == "PASSED"
    assert "model/model.keras" in [subject["name"] for subject in statement["subject"]]
    forge(tmp_path / "job", 6, 4)  # the last: no later one names it
    assert manifests(tmp_path / "job").keys() == {2, 4, 6}
    forged = run(tmp_path, "trainer.audit", "job", "--seed=3", "--segments=3")
    assert forged.returncode == USER_MUST_CHANGE
    assert "steps 5 to 6   CHANGED: most in " in forged.stderr
    assert json.loads((tmp_path / "audit.json").read_text())["predicate"]["result"] == "FAILED"
