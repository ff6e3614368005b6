"""Tests what `trainer.plan` predicts of memory against real steps, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.plan_memory import tried
from deploy.__main__ import main
from tests.fixtures import Capture
from trainer.base.run_files.plan_file import peak_of, read_plan


@pytest.mark.slow
def test_a_step_needs_what_was_predicted_and_its_largest_batch_runs() -> None:
    """A U-Net at twice the largest number of rows: its order, and so its peak, differs from process to process."""
    case = tried("U-Net", rows=8)
    worst = case["predicted"]["worst_order"]
    for kind in ("device", "cpu"):
        assert 1 / worst < case["measured"][kind] / case["predicted"][kind] < worst
    assert case["runs"] == [True]


@pytest.mark.slow
def test_a_plan_is_made_kept_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Two plans agree to 2 %, `deploy plan` makes one where none is kept, and says nothing of it where one is."""
    flags = ["--recipe=mlp_mnist", "--data=digits", "--width=64"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "trainer.plan", *flags, f"--out={tmp_path / 'plan.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "the plan is in" in done.stdout
    for expected in (True, False):
        assert main(["plan", "l4x1", "l4x8", *flags, "--global_batch_size=64", f"--out={tmp_path / 'out'}"]) == 0
        assert ("measures steps on this machine's CPU, once" in capsys.readouterr().out) == expected
    (kept,) = (tmp_path / "cache").rglob("plans/*.json")
    one, other = read_plan(tmp_path / "plan.json"), read_plan(kept)
    for rows in (1, 64, 4096):
        for lines in ("device", "device_16_bit", "cpu"):
            pair = (peak_of(getattr(plan.memory, lines), rows) for plan in (one, other))
            assert next(pair) == pytest.approx(next(pair), rel=0.02)
    assert one.key == other.key == kept.stem
    assert (one.all_reduces, one.reduced_bytes) == (1, 4 * (28 * 28 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10))
    assert one.work == other.work
    assert one.recomputed
    assert 1 < one.recomputed_flops < 1.5
    assert json.loads((tmp_path / "out" / "forecast.json").read_text())["tiers"][0]["fit"]["verdict"] == "fits"


def test_a_model_that_fails_has_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "broken_to_plan.py").write_text("def build(config, dataset):\n    return dataset.no_such_part\n")
    command = [sys.executable, "-m", "trainer.plan", "--model=broken_to_plan:build", "--data=digits",
               "--image_size=8", f"--out={tmp_path / 'plan.json'}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert (done.returncode, (tmp_path / "plan.json").exists()) == (2, False)
    assert "no_such_part" in done.stderr
    assert "Traceback" not in done.stderr
