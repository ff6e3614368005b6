"""run.json and result.json: what a run was, and how it ended."""

import dataclasses
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import trainer
from trainer.config import TrainConfig
from trainer.data.batches import Schedule
from trainer.distribution.strategy import Replicas
from trainer.progress import Progress, rounded
from trainer.reporting.resources import peak_memory_gib


def describe(
    config: TrainConfig, command: Sequence[str], replicas: Replicas, schedule: Schedule, total_steps: int
) -> dict[str, Any]:
    """The content of run.json."""
    return {
        "config": dataclasses.asdict(config),
        "batch": replicas.sentence(),
        "cluster": {"workers": 1, "replicas": replicas.count, "rows_per_replica": replicas.rows},
        "devices": list(replicas.devices),
        "strategy": type(replicas.strategy).__name__,
        "data": {
            "examples": schedule.examples,
            "examples_per_step": schedule.examples_per_step,
            "steps_per_epoch": schedule.steps_per_epoch,
        },
        "total_steps": total_steps,
        "versions": {
            "trainer": trainer.__version__,
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
        },
        "git_commit": _git_commit(),
        "command": shlex.join(command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def ended(state: str, progress: Progress, began: float, error: str | None = None) -> dict[str, Any]:
    """The content of result.json, but for epochs and final scalars. `began`: when this process did."""
    started_up = progress.first_call_ended
    return {
        "state": state,
        "error": error,
        "steps": progress.step,
        "epochs": round(progress.epoch, 4),
        "wall_seconds": round(time.monotonic() - began, 3),
        "startup_seconds": None if started_up is None else round(started_up - began, 3),  # to the first step's end
        "training_seconds": round(progress.training_seconds, 3),
        "images_per_second": rounded(progress.whole.images_per_second),
        "step_seconds": rounded(progress.whole.step_seconds),
        "peak_memory_gib": round(peak_memory_gib(), 3),
    }


def failed(error: str, began: float) -> dict[str, Any]:
    """The content of result.json for a run that did not come to train."""
    return {"state": "failed", "error": error, "wall_seconds": round(time.monotonic() - began, 3)}


def _git_commit() -> str | None:
    """The commit of the sources that run, where they lie in a git checkout of their own."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"]
    try:
        subprocess.run(command, capture_output=True, timeout=5, check=True)
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
