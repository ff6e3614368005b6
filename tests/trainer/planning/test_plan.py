"""Tests what `trainer.plan` predicts: memory against real steps, each in a process of its own, work
against a trace."""

import os
import subprocess
import sys
from pathlib import Path

import tensorflow as tf
from keras import layers

from benchmarks.plan_memory import CASES, tried
from deploy.__main__ import main
from tests.drill import read
from tests.fixtures import SLOW, Capture, Patch, parametrize
from tests.support import resolved, small
from tests.workers import python
from trainer.base.run_files.plan_file import read_plan
from trainer.data.sources import load_dataset
from trainer.invariance.internals import uses_onednn
from trainer.planning.planner import MeasuredStep
from trainer.training.step_operations import operations


@parametrize("case", CASES)
def test_the_settings_of_each_case_of_the_benchmark_hold(case: str) -> None:
    resolved(*CASES[case])  # raises where a model and its data contradict each other


@SLOW
def test_a_step_needs_what_was_predicted_and_its_largest_batch_runs(monkeypatch: Patch) -> None:
    """A U-Net at twice the largest number of rows: its order, and so its peak, differs from process
    to process."""
    # a CPU's kernels without oneDNN hold memory that no GPU does
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    # of fewer rows, what kernels take beside tensors may be more than the margin
    case = tried("U-Net", rows=16)
    for side, other in (("predicted", "measured"), ("measured", "predicted")):
        assert (
            max(case[other][kind] / case[side][kind] for kind in ("device", "cpu"))
            < case[side]["worst_order"]
        )
    # what its kernels take beside tensors the processor decides
    assert case["runs"] == [True] or not uses_onednn()


@SLOW
def test_a_plan_is_made_kept_and_used(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """`deploy plan` makes one only where none is kept."""
    flags = ["--recipe=mlp_mnist", "--data=digits", "--width=64"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for expected in (True, False):
        assert (
            main(
                [
                    "plan",
                    "l4x1",
                    "l4x8",
                    *flags,
                    "--global_batch_size=64",
                    f"--out={tmp_path / 'out'}",
                ]
            )
            == 0
        )
        shown = "".join(capsys.readouterr())
        assert (
            ("measures steps on this machine's CPU, once" in shown)
            == ("the plan is in" in shown)
            == expected
        )
    (kept,) = (tmp_path / "cache").rglob("plans/*.json")
    one = read_plan(kept)
    assert one.key == kept.stem
    assert one.work_of_two
    assert (one.work_of_two.all_reduces, one.work.all_reduces) == (1, 0)
    weights = 4 * (28 * 28 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10)
    assert one.work_of_two.reduced_bytes == one.trained_bytes == weights
    assert (one.own_loops, one.sums_within) == (False, False)
    assert one.cpu.cores >= 1
    assert one.cpu.seconds.at(32) > 0
    assert read(tmp_path / "out" / "forecast.json")["tiers"][0]["fit"]["verdict"] == "fits"


@parametrize("model, sums", [("classifier", False), ("own_batch_norm", True)])
def test_batch_norm_over_replicas_sums_within_a_step(model: str, sums: bool) -> None:
    config = small(f"--model=tests.models:{model}", "--data=digits")
    assert MeasuredStep(config, load_dataset(config), 8).sums_within == sums


def test_loops_of_a_model_are_counted_by_no_time() -> None:
    """As the loop over steps is counted once."""
    layer = layers.LSTM(2)
    layer.build((4, 3, 2))
    graph = tf.function(lambda x: layer(x) + 1.0).get_concrete_function(tf.zeros((4, 3, 2))).graph
    assert {(op.times, op.flops > 0) for op in operations(graph, (0,))} == {(0, False), (1, False)}


@SLOW  # two processes with TensorFlow
def test_a_plan_that_was_stopped_goes_on_with_what_it_measured(tmp_path: Path) -> None:
    words = ["-m", "trainer.plan", "--model=mlp", "--data=digits", "--image_size=8"]
    command = [sys.executable, *words]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    begun = "runs some steps of mlp with {} rows on this CPU"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        assert any(line.strip() == begun.format(16) for line in process.stdout)
        process.terminate()
    kept = {file.name for file in tmp_path.rglob("plans/*/*.json")}
    assert "1-8.json" in kept
    done = python(*words, XDG_CACHE_HOME=str(tmp_path))
    assert begun.format(8) not in done.stdout
    assert begun.format(32) in done.stdout
    (plan,) = tmp_path.rglob("plans/*")
    assert read_plan(plan).memory.measured_rows == [8, 16, 32]


@SLOW  # a process with TensorFlow
def test_a_model_that_fails_has_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "broken_to_plan.py").write_text(
        "def build(config, dataset):\n    return dataset.no_such_part\n"
    )
    flags = ["--model=broken_to_plan:build", "--data=digits", f"--out={tmp_path / 'plan.json'}"]
    done = python("-m", "trainer.plan", *flags, "--image_size=8", code=2, cwd=tmp_path)
    assert not (tmp_path / "plan.json").exists()
    assert "no_such_part" in done.stderr
    assert "Traceback" not in done.stderr
