"""Trains a stretch of a run again: the same command in a folder of its own, from the checkpoint that it begins with."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from trainer.base.errors import PlatformFault, UserError
from trainer.base.run_files.records import mapping
from trainer.base.run_files.run_layout import CHECKPOINTS, MANIFEST, RUN_INFO, step_name
from trainer.proofs.processes import OF_A_JOB, line_of
from trainer.proofs.stretches import Stretch
from trainer.run.requested_run import RequestedRun
from trainer.training.checkpoint import read_checkpoint

LONGEST_SECONDS = 24 * 3600.0
_LOOK_EVERY_SECONDS = 0.2


def trained_again(request: RequestedRun, stretch: Stretch, *, others: bool = False) -> Mapping[str, Any]:
    """Returns the variables after the stretch; `others`: on another number of replicas than the first time.

    Raises UserError with the line of a run that ended with it, PlatformFault for other ends.
    """
    with TemporaryDirectory(prefix="trainer-audit-") as folder:
        job_dir = Path(folder) / "job"
        job_dir.mkdir()
        if stretch.first:
            start = step_name(stretch.first)
            shutil.copytree(request.folder / CHECKPOINTS / start, job_dir / CHECKPOINTS / start)
            shutil.copyfile(request.folder / RUN_INFO, job_dir / RUN_INFO)
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(_settings(request)), encoding="utf-8")
        replicas = request.config.replicas
        if others:
            replicas = 1 if replicas > 1 else 2
        words = [sys.executable, "-m", "trainer.task", f"--recipe={recipe}", f"--job_dir={job_dir}",
                 f"--replicas={replicas or 1}"]  # fmt: skip
        end = job_dir / CHECKPOINTS / step_name(stretch.last)
        _run_until(words, end, Path(folder) / "log")
        return read_checkpoint(end)[1]


def _settings(request: RequestedRun) -> dict[str, Any]:
    """Returns the settings of the run as a recipe, but for its devices and for what changes no weights."""
    stored = {name: value for name, value in mapping(request.info, "config").items() if value is not None}
    compiled = mapping(request.info, "compilation").get("compiled")
    changed = {
        "strategy": "auto", "expect_devices": 0, "tensorboard": False, "max_minutes": 0.0, "profile_steps": "",
        "jit_compile": "true" if compiled else "false", "allow_replica_dependence": True,
    }  # fmt: skip
    if "data" in request.flags:
        changed["data"] = request.config.data
    dropped = ("recipe", "job_dir", "replicas")
    return {name: value for name, value in {**stored, **changed}.items() if name not in dropped}


def _run_until(words: list[str], checkpoint: Path, log: Path) -> None:
    """Runs the command until the checkpoint is whole, and ends it."""
    clean = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}
    until = time.monotonic() + LONGEST_SECONDS
    with log.open("wb") as output:
        process = subprocess.Popen(words, env=clean, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    try:
        while not (checkpoint / MANIFEST).is_file():
            if process.poll() is not None and not (checkpoint / MANIFEST).is_file():
                code, line = process.returncode, line_of(log)
                if code == UserError.exit_code:
                    raise UserError(f"the stretch cannot be trained again: {line}")
                raise PlatformFault(f"training the stretch again ended with exit code {code}: {line}")
            if time.monotonic() > until:
                raise PlatformFault(f"training the stretch again took longer than {LONGEST_SECONDS / 3600:.0f} h")
            time.sleep(_LOOK_EVERY_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
