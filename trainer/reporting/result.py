"""Counts a run's seconds, restarts and repeated steps over all its processes, and writes its result.json."""

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from trainer.base.errors import USER_MUST_CHANGE, UserError
from trainer.base.log import log
from trainer.base.run_files.job_directory import JobDir
from trainer.base.run_files.records import Result, last_reported_step
from trainer.base.settings.resolution import to_yaml
from trainer.base.settings.train_config import TrainConfig
from trainer.reporting.progress import Progress, rounded
from trainer.reporting.resources import peak_memory_gib


@dataclass
class RunResult:
    """Holds the counts of earlier processes of the run, adds those of this one, and alone writes result.json."""

    job_dir: JobDir | None  # None on a worker that is not the chief: it counts the same, and writes nothing
    before: Result  # result.json as the last process left it; {} for the first process
    settings: str  # a digest of the resolved settings
    began: float  # time.monotonic() when this process began
    restarts: int = 0
    steps_repeated: int = 0  # counted up to the last reported step of each earlier process
    saving_seconds: float = 0.0  # that this process waited for checkpoints
    rollbacks: int = 0
    depends_on_replicas: list[str] = field(default_factory=list)  # what the user allowed to differ
    progress: Progress | None = None  # set once the data and the model are loaded

    @classmethod
    def of_job(cls, config: TrainConfig, job_dir: JobDir | None, began: float) -> "RunResult":
        """Continues the counts of the job directory. A run that ended as planned is not counted as a restart."""
        before = job_dir.read_result() if job_dir else {}
        restarted = before.get("state") in ("running", "interrupted", "failed")
        return cls(
            job_dir, before, settings_digest(config), began,
            restarts=before.get("restarts", 0) + restarted,
            steps_repeated=before.get("steps_repeated", 0),
            rollbacks=before.get("rollbacks", 0),
            depends_on_replicas=before.get("depends_on_replicas", []),
        )  # fmt: skip

    @property
    def wall_seconds_before(self) -> float:
        """Returns the seconds of all earlier processes."""
        return float(self.before.get("wall_seconds", 0.0))

    @property
    def wall_seconds(self) -> float:
        """Returns the seconds of all processes up to now."""
        return self.wall_seconds_before + time.monotonic() - self.began

    def resume(self, progress: Progress) -> None:
        """Counts the steps to repeat: those between the step to resume from and the last known one.

        That is the last one in stats.jsonl or result.json; after a rollback, of this process.
        """
        reported = last_reported_step(self.job_dir.root) if self.job_dir else 0
        reached = self.progress.step if self.progress else max(self.before.get("steps", 0), reported)
        self.steps_repeated += max(0, reached - progress.step)
        self.progress = progress

    def write(self, state: str, measured: Result) -> None:
        """Replaces result.json; `measured`: what `Reporter.summary` returns."""
        if self.job_dir:
            self.job_dir.write_result({**self._counts(state), **measured})

    def write_failure(self, error: str, exit_code: int) -> None:
        """Records a failure in result.json, which keeps its other values; that of a finished run is left alone."""
        if not self.job_dir:
            return
        about = {"exit_code": exit_code, "settings": self.settings, "vertex_job": os.environ.get("CLOUD_ML_JOB_ID")}
        with suppress(UserError):  # if the file cannot be written either, the first error is the one to report
            if (known := self.job_dir.read_result()).get("state") != "done":
                self.job_dir.write_result({**known, **self._counts("failed", error), **cast(Result, about)})

    def _counts(self, state: str, error: str | None = None) -> Result:
        return {
            "state": state,
            "error": error,
            **(self._reached(self.progress) if self.progress else {}),
            "wall_seconds": round(self.wall_seconds, 3),
            "peak_memory_gib": round(peak_memory_gib(), 3),
            "restarts": self.restarts,
            "steps_repeated": self.steps_repeated,
            "rollbacks": self.rollbacks,
            **({"depends_on_replicas": self.depends_on_replicas} if self.depends_on_replicas else {}),
            "saving_seconds": round(self.before.get("saving_seconds", 0.0) + self.saving_seconds, 3),
        }

    def _reached(self, progress: Progress) -> Result:
        ended = progress.first_call_ended
        return {
            "steps": progress.step,
            "asked_steps": progress.asked_steps,
            "epochs": round(progress.epoch, 4),
            "startup_seconds": None if ended is None else round(ended - self.began, 3),
            "training_seconds": round(progress.training_seconds, 3),
            "images_per_second": rounded(progress.whole.images_per_second),
            "step_seconds": rounded(progress.whole.step_seconds),
            "input_wait_seconds": rounded(progress.whole.input_wait_seconds),
        }


def refuse_hopeless_restart(config: TrainConfig, before: Result) -> None:
    """Raises UserError if Vertex AI restarts a job that failed for a mistake of the user, with the same settings.

    Vertex AI restarts every job that exits non-zero. Elsewhere the user runs the command again, so it is tried again.
    """
    same_job = before.get("vertex_job") and before["vertex_job"] == os.environ.get("CLOUD_ML_JOB_ID")
    if same_job and before.get("exit_code") == USER_MUST_CHANGE and before.get("settings") == settings_digest(config):
        log.warning("this job has failed before, and a restart with the same settings cannot fix it:")
        raise UserError(before.get("error") or "its error is not known: submit the job again")


def settings_digest(config: TrainConfig) -> str:
    """Returns a digest of all settings except the recipe's name."""
    return hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16]
