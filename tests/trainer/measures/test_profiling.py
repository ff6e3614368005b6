"""Tests profiles of real runs: what the time of a step goes to, their files, and when none is made."""

import dataclasses
import json
import re
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures import Log, Patch
from tests.own_data import Batches
from tests.support import prepared, refused
from trainer.base.run_files.breakdown import DISPATCH, INPUT, MATRIX, TIME_SHARES
from trainer.base.run_files.run_layout import RUN_INFO
from trainer.base.settings.resolution import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.reporting.trace import PROFILES
from trainer.training.preemption import StopRequest

HERE = __name__
BATCHES = 24  # of an epoch
made: dict[float, float] = {}  # when each slow batch was made, by its first number
ended: list[tuple[float, float]] = []  # the first number of a step's batch, and when the step ended


class _Slow(Batches):
    """Takes `seconds` longer for each batch."""

    seconds = 0.0

    def __getitem__(self, batch: int) -> Any:
        time.sleep(self.seconds)
        found = super().__getitem__(batch)
        made[float(found[0][0, 0])] = time.time()
        return found


def rows_of(config: TrainConfig, *, columns: int = 4, batch_seconds: float = 0.0) -> Any:
    """Returns batches of noise, each made in no less than `batch_seconds`."""
    x = np.random.default_rng(0).normal(size=(BATCHES * config.global_batch_size, columns)).astype(np.float32)
    rows = _Slow((x, x[:, :1]), config.global_batch_size)
    rows.seconds = batch_seconds
    return rows


class _Chain(keras.layers.Layer):
    """Applies 700 small operations, one after the other; the gradient has two for each."""

    def call(self, x: Any) -> Any:
        first = x
        for _ in range(350):  # without the products TensorFlow would join the sines
            x = tf.sin(x) * first
        return x


def _sleep(x: Any) -> Any:
    time.sleep(0.08)
    ended.append((float(x[0, 0]), time.time()))
    return x


class _Sleep(keras.layers.Layer):
    """Takes 80 ms."""

    def call(self, x: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(_sleep, [x], x.dtype), x.shape)


def model_of(config: TrainConfig, dataset: Dataset, *, layers: str = "small") -> keras.Model:
    """Returns one of 2,100 tiny operations, of large products, of 80 ms; else of next to nothing."""
    kinds = {
        "small": [],
        "chain": [_Chain()],
        "products": [keras.layers.Dense(2048, use_bias=False)],
        "sleep": [_Sleep()],
    }
    model = keras.Sequential([keras.Input(dataset.spec[0].shape), *kinds[layers], keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-6), loss="mse")
    return model


@pytest.fixture(autouse=True)
def _not_rehearsed(monkeypatch: Patch) -> None:
    """Leaves out the export that is tried before training: nothing is exported here."""
    monkeypatch.setattr("trainer.run.training_run.rehearse", lambda *given: None)


def trained(folder: Path, *flags: str) -> Path:
    """Trains without export; returns the job directory."""
    own = [f"--model={HERE}:model_of", f"--data={HERE}:rows_of", f"--job_dir={folder}"]
    config = resolve([*own, "--global_batch_size=16", "--report_every_steps=10", *flags]).config
    run = prepared(config)
    run.job.job_dir.write(RUN_INFO, {"config": dataclasses.asdict(config)})
    with closing(run.state.reporter) as reporter:
        reporter.begin()
        run.train(StopRequest())
        run.save()
        run.checkpoints.wait()
    return folder


def result_of(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


def lines_of(folder: Path, kind: str) -> list[Any]:
    found = [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


ATTEMPTS = ("one", "two", "three")  # other work on the machine may delay threads of one run

PRODUCTS = ("--layers=products", "--columns=512", "--global_batch_size=1024")


@pytest.mark.parametrize(("flags", "main", "advised"), [
    (("--layers=chain",), DISPATCH, "--jit_compile"), (PRODUCTS, MATRIX, "mixed_bfloat16"),
])  # fmt: skip
def test_steps_of_tiny_operations_and_of_large_products_are_told_apart(
    tmp_path: Path, caplog: Log, flags: tuple[str, ...], main: str, advised: str
) -> None:
    for attempt in ATTEMPTS:
        caplog.clear()
        folder = trained(tmp_path / attempt, "--steps=20", "--profile_steps=11..15", *flags)
        profile = result_of(folder)["profile"]
        shares = profile["shares"]
        is_advised = any(advised in record.message for record in caplog.records)
        if shares[main] > 0.5 and is_advised:
            break
    assert (profile["first_step"], profile["last_step"], list(shares)) == (11, 15, list(TIME_SHARES))
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    assert max(shares, key=shares.__getitem__) == main
    assert shares[main] > 0.5
    (line,) = lines_of(folder, "profile")
    assert (line["step"], line["first_step"], line["shares"]) == (15, 11, shares)
    assert [report["step"] for report in lines_of(folder, "report")] == [10, 20]
    assert len(list((folder / "logs").glob(PROFILES))) == 1
    assert is_advised


def test_the_share_that_is_lost_for_input_is_within_five_points_of_the_truth(tmp_path: Path, caplog: Log) -> None:
    """A step of 80 ms waits 120 of 200 ms, once the batches that were made while the graph was built are used up.

    On a busy machine less, so that the truth is when each batch was made, and when the step before had ended.
    """
    flags = ("--layers=sleep", "--batch_seconds=0.2", "--steps=20", "--profile_steps=13..20", "--report_every_steps=12")
    for attempt in ATTEMPTS:
        folder = trained(tmp_path / attempt, *flags)
        waits = [max(0.0, made[batch] - before) for (_, before), (batch, _) in pairwise(ended)][-8:]
        truth = sum(waits) / (ended[-1][1] - ended[-9][1])
        last = lines_of(folder, "report")[-1]
        found = [result_of(folder)["profile"]["shares"][INPUT], last["input_wait_seconds"] / last["step_seconds"]]
        if found == pytest.approx([truth, truth], abs=0.05):
            break
    assert 0.2 < truth < 0.7
    assert found == pytest.approx([truth, truth], abs=0.05)
    assert re.search(r"20/20 .* waits for input \d\d %", caplog.text)
    assert "prepare the data" in caplog.text


def test_a_profile_is_kept_by_a_run_that_resumes_and_not_made_again(tmp_path: Path, caplog: Log) -> None:
    """One whose steps the first call of a process holds, which builds the graph, is not made; the line says so."""
    flags = ("--profile_steps=2..3", "--checkpoint_every_steps=6")
    profile = result_of(trained(tmp_path, *flags, "--steps=6"))["profile"]
    again = result_of(trained(tmp_path, *flags, "--steps=9"))
    assert (again["steps"], again["profile"]) == (9, profile)
    assert len(list((tmp_path / "logs").glob(PROFILES))) == 1
    assert "profile_steps" not in caplog.text
    later = result_of(trained(tmp_path, "--profile_steps=10..12", "--steps=14"))
    assert (later["steps"], later["profile"]) == (14, profile)
    assert "profile_steps: the run starts at step 9" in caplog.text


def test_a_run_that_ends_within_the_steps_has_a_profile_of_those_before(tmp_path: Path) -> None:
    assert result_of(trained(tmp_path, "--profile_steps=4..50", "--epochs=1"))["profile"]["last_step"] == BATCHES


def test_a_profile_of_one_step_is_reported(tmp_path: Path) -> None:
    profile = result_of(trained(tmp_path, "--profile_steps=3..3", "--steps=4"))["profile"]
    assert (profile["first_step"], profile["last_step"]) == (3, 3)


def test_without_it_no_profiler_is_started(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.delattr(tf.profiler.experimental, "start")
    folder = trained(tmp_path, "--steps=5")
    assert not list((folder / "logs").glob("plugins"))
    assert (lines_of(folder, "profile"), "profile" in result_of(folder)) == ([], False)
    assert all(line["input_wait_seconds"] >= 0 for line in lines_of(folder, "report"))


def test_another_profiler_that_runs_is_left_alone(tmp_path: Path, caplog: Log) -> None:
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        assert "profile" not in result_of(trained(tmp_path / "run", "--profile_steps=4..5", "--steps=6"))
    finally:
        tf.profiler.experimental.stop()
    assert "profile_steps: TensorFlow's profiler cannot start" in caplog.text


@pytest.mark.parametrize(("steps", "line"), [
    ("100", "profile_steps=100: write it as 100..110"),
    ("1..5", "profile_steps=1..5: write it as 100..110 (first step..last step): 1 to 100 steps, from"),
    ("9..8", "1 to 100 steps"),
    ("100..200", "1 to 100 steps"),
    ("18..21", "profile_steps=18..21, but the run ends at step 20: take earlier ones"),
])  # fmt: skip
def test_steps_that_cannot_be_profiled_are_refused(steps: str, line: str) -> None:
    with refused(line):
        resolve(["--recipe=wgan_gp_digits", "--steps=20", f"--profile_steps={steps}"])
