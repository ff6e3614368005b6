"""Tests what ends a run early: signals, a budget, NaN; and early stopping, which an interruption
must not undo."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.drill import numbers, read
from tests.e2e.test_interruption import check_same
from tests.fixtures import SLOW, Folders, Log, Make, Patch, parametrize
from tests.support import Signals, read_lines, tiny
from tests.support import run_job as run
from tests.workers import ROOT, until
from trainer.base.errors import INTERRUPTED, UserError
from trainer.base.run_files.job_files import write_json
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.measures.evaluation import Evaluation
from trainer.run import job
from trainer.training import signals
from trainer.training.checkpoint import checkpoint_folders, read_checkpoint
from trainer.training.loop import Control
from trainer.training.signals import StopRequest, stop_on_signals
from trainer.training.steps import StepRunner


def result_of(folder: Path) -> dict[str, Any]:
    return read(folder / "result.json")


def test_a_save_is_due_every_so_many_minutes() -> None:
    now = [100.0]
    control = Control(
        make_replicas(TrainConfig()), StopRequest(), save_every_seconds=60, clock=lambda: now[0]
    )
    due = []
    for _ in range(8):
        now[0] += 25
        assert control.agree(1.5) == 1.5
        due.append(control.save_due)
    assert due == [False, False, True, False, False, True, False, False]
    assert not control


def test_the_first_signal_is_a_request_and_the_second_leaves(monkeypatch: Patch) -> None:
    left = []
    monkeypatch.setattr(signals, "end_process", lambda: left.append("at once"))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_signals() as stop:
        control = Control(make_replicas(TrainConfig()), stop)
        control.agree(1.0)
        assert not control
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: stop)
        control.agree(1.0)
        assert (bool(control), control.signal, left) == (True, "SIGTERM", [])
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: left)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@parametrize("compiling", [True, False])
def test_a_signal_leaves_while_a_step_is_compiled(compiling: bool, monkeypatch: Patch) -> None:
    left = threading.Event()
    monkeypatch.setattr(signals, "_COMPILING_SECONDS", 0.2)
    monkeypatch.setattr(signals, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(signals, "end_process", left.set)
    with stop_on_signals() as stop:
        stop.nothing_to_save = compiling
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: stop)
        assert left.wait(30 if compiling else 0.5) == compiling


LONG_CALL = """
import tensorflow as tf
from trainer.base.log import start_logging
from trainer.training.signals import stop_on_signals

start_logging()
with stop_on_signals():
    print("begins", flush=True)
    product = lambda i, x: (i + 1, tf.linalg.matmul(x, x))
    tf.function(lambda x: tf.while_loop(lambda i, x: i < 10**9, product, (0, x)))(tf.eye(256))
"""


@SLOW
def test_two_signals_within_one_call_to_the_device_leave_at_once() -> None:
    """Covers a long call, during which Python runs no handler and would see one signal."""
    command = [sys.executable, "-c", LONG_CALL]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            assert "begins\n" in iter(process.stdout.readline, "")  # after lines of TensorFlow
            time.sleep(0.5)  # into the call
            process.send_signal(signal.SIGTERM)
            line = "SIGTERM: saves after the running steps; a second signal stops at once, unsaved"
            assert process.stdout.readline() == f"warning: {line}\n"  # in the midst of the call
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=30)
        finally:
            watchdog.cancel()
            process.kill()
    assert process.returncode == 75
    assert "stopped at once: the same command resumes from the last checkpoint" in out


def test_checkpoints_by_the_clock(small_config: Make) -> None:
    flags = (
        "--model=mlp",
        "--checkpoint_every_steps=0",
        "--checkpoint_every_minutes=1e-9",
        "--steps_per_loop=1",
    )
    folder = run(small_config(*flags, "--steps=3"))
    assert [int(path.name[5:]) for path in checkpoint_folders(folder / "checkpoints")] == [1, 2, 3]


def test_the_budget_counts_over_restarts_and_ends_the_run(small_config: Make) -> None:
    flags = ("--steps_per_loop=1",)
    folder = Path(small_config().job_dir)
    folder.mkdir()
    spent = small_config(*flags, "--steps=30", "--max_minutes=5")
    # of a process before
    write_json(folder / "result.json", {"state": "running", "wall_seconds": 299.9})
    run(spent)
    result = result_of(folder)
    assert (result["state"], result["steps"], result["error"]) == ("budget", 1, None)
    assert result["wall_seconds"] > 300
    assert (folder / "model" / "model.keras").is_file()
    assert result["final"]["losses"]
    run(spent)
    assert result_of(folder) == result  # it ended at once
    run(small_config(*flags, "--steps=3", "--max_minutes=50"))
    assert (result_of(folder)["state"], result_of(folder)["steps"]) == ("done", 3)


DIVERGES = ("--model=tests.models:diverging", "--steps_per_loop=1", "--checkpoint_every_steps=1")


def test_on_vertex_a_hopeless_restart_ends_before_training(
    small_config: Make, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "7")
    config = small_config(*DIVERGES, "--learning_rate=0.1", "--steps=6")
    with pytest.raises(UserError) as first:
        run(config)

    def trained(*given: Any) -> None:
        raise AssertionError("it came to train")

    monkeypatch.setattr(job, "prepare_run", trained)
    for _ in range(2):
        with pytest.raises(UserError) as again:
            run(config)
        assert str(again.value) == str(first.value)
        assert result_of(Path(config.job_dir))["error"] == str(first.value)


STOPS = (
    "--model=mlp",
    "--width=8",
    "--global_batch_size=256",
    "--evaluation_fraction=0.3",
    "--learning_rate=0.3",
    "--early_stopping=val_loss",
    "--patience=2",
    "--steps=240",
    "--checkpoint_every_steps=4",
    "--report_every_steps=3",
    "--jit_compile=false",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Folders) -> Path:
    """Runs a job that stops early."""
    folder = run(tiny(*STOPS, f"--job_dir={tmp_path_factory.mktemp('undisturbed') / 'job'}"))
    assert 12 <= result_of(folder)["steps"] < 200
    return folder


def check_stopped_alike(folder: Path, undisturbed: Path) -> None:
    check_same(folder, undisturbed, tolerance=1e-5)
    ours, theirs = (
        read_checkpoint(checkpoint_folders(one / "checkpoints")[-1])[0]["state"]
        for one in (folder, undisturbed)
    )
    assert ours["best"]["step"] == theirs["best"]["step"]
    assert ours["callbacks"].keys() == theirs["callbacks"].keys() == {"EarlyStopping-1"}
    stopping, expected = (state["callbacks"]["EarlyStopping-1"] for state in (ours, theirs))
    assert stopping["monitor"] == "val_loss"
    assert stopping["values"] == pytest.approx(expected["values"], rel=1e-5)


@SLOW
def test_a_signal_before_or_in_the_midst_of_a_measurement_leaves_it_to_the_same_command(
    small_config: Make, undisturbed: Path, monkeypatch: Patch
) -> None:
    signals = Signals(monkeypatch)
    call = StepRunner.__call__
    measure = Evaluation.__call__
    stopped_at = result_of(undisturbed)["steps"]
    reached = [0]
    before = [3, 4, stopped_at]
    within = [8]

    def come_at(steps: list[int]) -> None:
        if reached[-1] in steps:
            steps.remove(reached[-1])
            signals.come()

    def called(self: StepRunner, iterator: Any, first_step: int, count: int) -> Any:
        logs = call(self, iterator, first_step, count)
        reached.append(first_step + count)
        come_at(before)
        return logs

    def measured(self: Evaluation) -> dict[str, float]:
        come_at(within)
        return measure(self)

    monkeypatch.setattr(StepRunner, "__call__", called)
    monkeypatch.setattr(Evaluation, "__call__", measured)
    config = small_config(*STOPS, "--steps_per_loop=1")
    folder = Path(config.job_dir)
    for step in (3, 4, 8, stopped_at):
        assert job.run(config, ["test"], time.monotonic()) == INTERRUPTED
        assert (result_of(folder)["state"], result_of(folder)["steps"]) == ("interrupted", step)
        assert step not in [number[1] for number in numbers(folder)]
    check_stopped_alike(run(config), undisturbed)


@SLOW
def test_a_run_that_stopped_early_reports_it_and_how_to_continue(
    small_config: Make, undisturbed: Path, caplog: Log
) -> None:
    folder = Path(small_config().job_dir)
    steps = result_of(undisturbed)["steps"]
    shutil.copytree(undisturbed, folder)
    run(small_config(*STOPS))
    line = (
        f"stopped early after {steps} of 240 steps: use more than 240 steps and a larger --patience"
        " to continue"
    )
    assert line in caplog.text
    run(small_config(*STOPS, "--steps=241", "--patience=200"))
    assert result_of(folder)["steps"] == 241


def test_the_best_checkpoint_is_kept_beside_the_newest(small_config: Make) -> None:
    flags = [flag for flag in STOPS if not flag.startswith(("--early", "--patience", "--steps"))]
    folder = run(
        small_config(*flags, "--steps=48", "--keep_checkpoints=1", "--best_metric=val_loss")
    )
    lines = read_lines(folder / "stats.jsonl")
    best = min(
        (line["losses"]["val_loss"], line["step"]) for line in lines if line["kind"] == "evaluation"
    )
    kept = [int(path.name[5:]) for path in checkpoint_folders(folder / "checkpoints")]
    assert kept == sorted({best[1], result_of(folder)["steps"]})
