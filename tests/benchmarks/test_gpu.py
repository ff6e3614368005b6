"""Rehearses the measurement of a GPU on a CPU: parts that end well, fail or hang, and what they
leave."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import DONE, REHEARSED, constants
from benchmarks.gpu.network import summary
from deploy.planning.step_time import CONSTANTS, FILE, read_constants
from tests.docs.sources import ROOT


def test_constants_are_the_measured_ones_and_as_before_those_that_were_not(tmp_path: Path) -> None:
    found = {"ended": DONE, "seconds": 3.0, "context_gib": 0.4}
    (tmp_path / "parts.json").write_text(json.dumps(constants({"constants": found}, ["X"])))
    read = read_constants(tmp_path / "parts.json")
    assert read == replace(CONSTANTS, context_gib=0.4, source=read.source)
    assert read.source.startswith("context_gib measured on X, ")


def test_kernels_are_counted_and_overlaps_count_once() -> None:
    assert summary([(0, 4), (2, 6), (8, 10)], 10) == pytest.approx([0.3, 8e-13, 0.8])
    assert summary([], 10) == []


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
    """Runs some parts as on a bare machine: the checkout on PYTHONPATH, no installation of it, no
    network."""
    parts = ["constants", "network_mlp"]
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        f"--parts={','.join(parts)}",
        f"--out={tmp_path}/out",
    ]
    before = FILE.read_bytes()
    (tmp_path / "sitecustomize.py").write_text(BARE_MACHINE)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "https_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout
    assert [f"{name}: {DONE}" in done.stdout for name in parts] == [True] * 2
    assert REHEARSED in done.stdout
    assert read_constants(tmp_path / "out" / FILE.name).source.startswith("Fitted to ")
    assert FILE.read_bytes() == before
