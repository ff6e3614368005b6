"""Provides studies on this machine whose jobs are real processes without TensorFlow."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deploy.__main__ import main
from deploy.tiers.tier import JOB_CONFIGS
from tests.deploy.conftest import ROOT, Capture

OWN = "tests.deploy.study.quadratic"
STUDY = [f"--model={OWN}:build", f"--data={OWN}:data", "--metric=loss", "--steps=3", "--out=study"]
Tune = Callable[..., subprocess.CompletedProcess[str]]


def tier(folder: Path, module: str) -> Path:
    """Writes a tier whose worker runs `module`."""
    spec = yaml.safe_load((JOB_CONFIGS / "cpu.yaml").read_text())
    spec["workerPoolSpecs"][0]["pythonPackageSpec"]["pythonModule"] = module
    file = folder / "quick.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "deploy", "tune", "quick.yaml", *STUDY, *arguments]


@pytest.fixture
def tune(_own_folder: None, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Tune:
    """Returns a function that runs `tune`, whose jobs are processes of quadratic.py."""
    tier(Path(), OWN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))

    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        words = command(*arguments)
        ended, shown = main(words[3:]), capsys.readouterr()
        assert ended == code, (ended, shown.out, shown.err)
        assert "Traceback" not in shown.err
        return subprocess.CompletedProcess(words, ended, shown.out, shown.err)

    return run
