"""Rehearses the measurement of GPUs on a CPU: parts that end well, hang, are killed or run out of memory."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.gpu.execution import DONE, FAILED, LATE, LEFT_OUT, TURNS, Outcome, run_parts, turn
from benchmarks.gpu.kernels import summary
from benchmarks.gpu.page import REHEARSED, constants, page
from benchmarks.gpu.parts import FAULTS, PARTS
from deploy.planning.gpu_constants import CONSTANTS, read_constants
from tests.docs.sources import ROOT

ABOUT = {
    "date": "2026-11-24", "gpus": ["NVIDIA H100 80GB HBM3, 81559 MiB, 580.1"], "processor": "x86_64",
    "packages": {"tensorflow": "2.21.0"}, "command": "python -m benchmarks.gpu", "rehearsed": False,
}  # fmt: skip


def test_a_part_that_hangs_is_killed_or_lacks_memory_stops_no_other(tmp_path: Path) -> None:
    outcomes = run_parts(FAULTS, tmp_path, minutes=2, gpus=0, rehearse=True)
    assert [outcome.state for outcome in outcomes.values()] == [LATE, FAILED, FAILED]
    assert all(outcome.result == {"before": 1} for outcome in outcomes.values())  # what was measured before is kept
    assert outcomes["fault_killed"].reason == "ended by SIGKILL"
    assert "MemoryError" in outcomes["fault_memory"].reason
    kept = json.loads((tmp_path / "parts.json").read_text())
    assert [part["state"] for part in kept.values()] == [LATE, FAILED, FAILED]


def test_parts_without_time_or_gpus_are_left_out_with_the_reason(tmp_path: Path) -> None:
    several = next(part for part in PARTS if part.gpus > 1)
    outcomes = run_parts([several, FAULTS[0]], tmp_path, minutes=0.1, gpus=1, rehearse=False)
    assert [outcome.state for outcome in outcomes.values()] == [LEFT_OUT, LEFT_OUT]
    assert [outcome.reason for outcome in outcomes.values()] == [
        "it needs 2 GPUs, this machine has 1", "the 0.1 minutes are over",
    ]  # fmt: skip


def test_constants_are_the_measured_ones_and_as_before_those_that_were_not(tmp_path: Path) -> None:
    outcomes = {
        "constants": Outcome("", DONE, result={"launch_seconds": 4e-6, "context_gib": 0.4}),
        "memory": Outcome("", DONE, result={"networks": {"a": {"workspace_gib": 0.2}, "b": {"workspace_gib": 0.6}}}),
    }
    content = constants(outcomes, "measured on X, 2026-11-24")
    file = tmp_path / "gpu_constants.json"
    file.write_text(json.dumps(content))
    read = read_constants(file)
    assert (read.launch_seconds, read.context_gib, read.workspace_gib) == (4e-6, 0.4, 0.6)
    assert read.nccl_gib == CONSTANTS.nccl_gib
    assert read.source == "measured on X, 2026-11-24; all_reduce_seconds, nccl_gib assumed"


def test_parts_that_run_together_end_as_alone(tmp_path: Path) -> None:
    several = next(part for part in PARTS if part.gpus > 1)
    outcomes = run_parts([*FAULTS, several], tmp_path, minutes=2, gpus=1, rehearse=False, together=True)
    assert [outcome.state for outcome in outcomes.values()] == [LATE, FAILED, FAILED, LEFT_OUT]
    assert json.loads((tmp_path / "parts.json").read_text()).keys() == outcomes.keys()


def test_who_measures_waits_for_those_who_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TURNS, str(tmp_path / "turns"))
    with turn(alone=False), turn(alone=False):
        pass
    order: list[str] = []

    def measure() -> None:
        with turn(alone=True):
            order.append("measured")

    thread = threading.Thread(target=measure)
    with turn(alone=False):
        thread.start()
        order.append("built")
    thread.join(timeout=60)
    assert order == ["built", "measured"]


def test_kernels_are_summed_by_name_and_overlaps_count_once() -> None:
    events = [(0, 4, "a"), (2, 6, "b"), (8, 10, "a")]
    assert summary(events) == {
        "busy": 0.8, "step_ms": 1e-9, "kernels": 0.3, "longest": {"a": 0.6, "b": 0.4},
    }  # fmt: skip
    assert summary([]) == {}


def test_the_page_says_what_was_measured_and_whether_it_was_a_rehearsal() -> None:
    rates = {"ours, plain": 50.0, "ours, XLA": 80.0, "Keras fit": 60.0, "Keras fit, XLA": 64.0}
    speeds = {"steps_per_second": rates, "auto": "XLA compiles the steps"}
    outcomes = {
        "speeds_cnn": Outcome("", DONE, 60.0, result=speeds),
        "memory": Outcome(
            "memory?", LATE, 240.0, "ended after its limit of 240 s", {"networks": {"unet": {"rows": 4}}}
        ),
    }
    text = page(outcomes, ABOUT)
    assert "| cnn | 50 | 80 | 60 | 64 |  | 1.25 | XLA compiles the steps |" in text
    assert "| memory | out of time | 240 | ended after its limit of 240 s |" in text
    assert REHEARSED not in text
    assert REHEARSED in page(outcomes, {**ABOUT, "rehearsed": True})


# Runs at the start of each Python process: what a bare machine with TensorFlow alone does not have.
BARE_MACHINE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {"google.cloud", "google.auth", "matplotlib", "optuna", "pytest", "pip"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.mark.slow
def test_the_command_is_rehearsed_from_a_folder_alone(tmp_path: Path) -> None:
    """Runs some parts as on a bare machine: the checkout on PYTHONPATH, no installation of it, no network."""
    parts = "batch_norm,constants,input_path,fault_killed"
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", f"--parts={parts}", f"--out={tmp_path}/out"]
    before = (ROOT / "deploy" / "planning" / "gpu_constants.json").read_bytes()
    (tmp_path / "sitecustomize.py").write_text(BARE_MACHINE)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert "3 of 4 parts are done" in done.stdout
    assert REHEARSED in (tmp_path / "out" / "gpu_results.md").read_text()
    assert read_constants(tmp_path / "out" / "gpu_constants.json").source.startswith("rehearsed on a CPU; ")
    assert (ROOT / "deploy" / "planning" / "gpu_constants.json").read_bytes() == before
    assert REHEARSED not in (ROOT / "docs" / "gpu_results.md").read_text()


def test_without_a_gpu_one_line_says_what_to_do(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.gpu", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: this machine has no NVIDIA driver: run it on one with a GPU, or try it with --rehearse\n"
    )


def test_each_part_has_a_module_and_the_acceptance_is_first() -> None:
    assert all((ROOT / "benchmarks" / "gpu" / f"{part.arguments[0]}.py").is_file() for part in (*PARTS, *FAULTS))
    assert PARTS[0].name == "acceptance"
