"""Counts the seconds, restarts and repeated steps of a run, and writes result.json."""

import hashlib
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

import trainer
from trainer.base.errors import USER_MUST_CHANGE, UserError
from trainer.base.log import log
from trainer.base.run_files.goodput import REPEATED, STEP, Goodput
from trainer.base.run_files.job_directory import JobDir
from trainer.base.run_files.job_files import RESULT, Result, Speeds, last_reported_step
from trainer.base.settings.request import to_recipe
from trainer.base.settings.train_config import TrainConfig
from trainer.reporting.progress import Progress
from trainer.reporting.resources import peak_memory_gib

# Values that a process takes over from the one before, and values that result.json has if there is
# something to say.
_KEPT = ("steps_repeated", "depends_on_replicas", "not_compared", "replica_checks", "slow_worker")
_IF_ANY = ("depends_on_replicas", "not_compared", "replica_checks", "saved_model", "slow_worker")


@dataclass
class ResultWriter:
    """Holds counts of this and earlier processes of the run. Only this class writes result.json."""

    # None on a worker that is not the chief: it counts the same, and writes nothing
    job_dir: JobDir | None
    before: Result  # result.json as the last process left it; {} for the first process
    settings: str  # a digest of the resolved settings
    began: float  # time.monotonic() when this process began
    goodput: Goodput
    restarts: int = 0
    steps_repeated: int = 0  # up to the last reported step of each earlier process
    saving_seconds: float = 0.0  # how long this process waited for checkpoints
    # the differences on replicas that the user has allowed
    depends_on_replicas: list[str] = field(default_factory=list)
    saved_model: str = ""  # whether model/ agrees with the model in memory, in one line
    not_compared: str = ""  # why it is not known whether the number of replicas changes the result
    # the outcome of the proof or comparison, by the steps that were compared
    replica_checks: dict[str, str] = field(default_factory=dict)
    # when the first process of this Vertex AI job began, in seconds since 1970
    job_began_at: float = 0.0
    # the name of a slow worker, and why it is slow; {} if there is none
    slow_worker: dict[str, str] = field(default_factory=dict)
    progress: Progress | None = None  # set once the data and the model are loaded

    @classmethod
    def of_job(cls, config: TrainConfig, job_dir: JobDir | None, began: float) -> "ResultWriter":
        """Continues the counts in the job directory.

        It is a restart unless the last process ended as planned, or by a mistake that was mended.
        """
        before = job_dir.read_result() if job_dir else {}
        unplanned = before.get("state") in ("running", "interrupted", "failed")
        restarted = unplanned and before.get("exit_code") != USER_MUST_CHANGE
        goodput = Goodput(began, before)
        if job_dir:
            goodput.recover(before, paid=same_job(before))
        counts: dict[str, Any] = {name: value for name, value in before.items() if name in _KEPT}
        job_began_at = before.get("job_began_at") if same_job(before) else None
        return cls(
            job_dir,
            before,
            settings_digest(config),
            began,
            goodput,
            restarts=before.get("restarts", 0) + restarted,
            job_began_at=job_began_at or time.time(),
            **counts,
        )

    @property
    def wall_seconds(self) -> float:
        """Returns the seconds of all processes of the run up to now."""
        return sum(self.goodput.seconds().values())

    def resume(self, progress: Progress) -> None:
        """Takes the progress to resume from, and counts the steps that have to be repeated.

        They go up to the last step in stats.jsonl or result.json.
        """
        trained = self.before.get("steps", 0)  # goodput has the time of these as that of steps
        pace = self.before.get("step_seconds") or 0.0
        reached = max(trained, last_reported_step(self.job_dir.root) if self.job_dir else 0)
        self.steps_repeated += max(0, reached - progress.run_step)
        self.goodput.move(max(0, trained - progress.run_step) * pace, STEP, REPEATED)
        self.progress = progress

    def name_slow(self, name: str, why: str) -> None:
        """Records and logs which worker slows the others down, unless one has been named before."""
        if not self.slow_worker:
            self.slow_worker = {"name": name, "why": why}
            log.warning(f"{name} is slow: {why}")

    def write(self, state: str, measured: Result, error: str | None = None) -> None:
        """Replaces result.json, on the chief.

        `measured`: values of the run, such as those of `Reporter.summary`.
        """
        if self.job_dir:
            self.job_dir.write(RESULT, {**self._content(state, error), **measured})

    def write_end(self, state: str, error: str, exit_code: int | None = None) -> None:
        """Records in result.json a failure, or a stop while a step hung; its other values stay.

        The result of a finished run is not touched.
        """
        about: Result = {}
        if exit_code is not None:
            about = {"exit_code": exit_code, "settings": self.settings}
        if self.job_dir:
            # If the file cannot be written either, the first error is the one to report.
            with suppress(UserError):
                if (known := self.job_dir.read_result()).get("state") != "done":
                    self.job_dir.write(RESULT, {**known, **self._content(state, error), **about})

    def _content(self, state: str, error: str | None) -> Result:
        """Returns what result.json always has: state, counts and seconds, but no metrics."""
        # A failure before the model is loaded leaves no progress to tell of.
        seconds = self.goodput.seconds()
        progress = self.progress
        reached: Result = {}
        if progress:
            ended = progress.first_call_ended
            reached = {
                "steps": progress.run_step,
                "asked_steps": progress.steps_before + progress.asked_steps,
                "epochs": round(progress.epoch, 4),
                "startup_seconds": None if ended is None else round(ended - self.began, 3),
                "training_seconds": round(progress.training_seconds, 3),
                "step_flops": progress.flops or None,
            }

        saving_seconds = self.before.get("saving_seconds", 0.0) + self.saving_seconds
        return {
            "state": state,
            "error": error,
            **reached,
            **(progress.speeds(progress.whole) if progress else Speeds()),
            "vertex_job": os.environ.get("CLOUD_ML_JOB_ID"),
            "written_at": round(time.time(), 3),
            "job_began_at": round(self.job_began_at, 3),
            "wall_seconds": round(sum(seconds.values()), 3),
            "goodput": {name: round(value, 3) for name, value in seconds.items()},
            "between_jobs_seconds": round(self.goodput.unpaid_seconds, 3),
            "peak_memory_gib": round(peak_memory_gib(), 3),
            "restarts": self.restarts,
            "steps_repeated": self.steps_repeated,
            **cast(Result, {name: value for name in _IF_ANY if (value := getattr(self, name))}),
            "saving_seconds": round(saving_seconds, 3),
        }


def refuse_hopeless_restart(config: TrainConfig, before: Result) -> None:
    """Raises UserError if Vertex AI has restarted a job that a mistake had ended, unchanged.

    Vertex AI restarts every job that exits non-zero. Elsewhere it is the user who runs it again, so
    it is tried again.
    """
    failed = same_job(before) and before.get("exit_code") == USER_MUST_CHANGE
    if failed and before.get("settings") == settings_digest(config):
        log.warning(
            "this job has failed before, and a restart with the same settings cannot fix it:"
        )
        raise UserError(before.get("error") or "its error is not known: submit the job again")


def same_job(before: Result) -> bool:
    """Returns whether the process that wrote `before` belonged to this same Vertex AI job."""
    job = before.get("vertex_job")
    return bool(job) and job == os.environ.get("CLOUD_ML_JOB_ID")


def settings_digest(config: TrainConfig) -> str:
    """Returns a digest of all settings except the recipe's name."""
    return hashlib.sha256(to_recipe(config).encode()).hexdigest()[:16]


def library_versions() -> dict[str, str]:
    """Returns the versions of this package, of Python and of libraries that change numbers."""
    return {
        "trainer": trainer.__version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
    }
