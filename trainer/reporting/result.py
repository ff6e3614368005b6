"""The account of a run over all its restarts: seconds, restarts, steps done twice; it makes result.json."""

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.recipe import to_yaml
from trainer.config.train_config import TrainConfig
from trainer.errors import USER_MUST_CHANGE, UserError
from trainer.log import log
from trainer.reporting.progress import Progress, rounded
from trainer.reporting.resources import peak_memory_gib


@dataclass
class RunResult:
    """What this process knows of those before it, and adds to it."""

    before: Mapping[str, Any]  # result.json as the last process left it; {} for none
    settings: str  # a digest of the resolved settings
    began: float  # time.monotonic() when this process began
    restarts: int = 0
    steps_repeated: int = 0  # as far as the reports of earlier processes tell
    saving_seconds: float = 0.0  # that this process waited for checkpoints
    rollbacks: int = 0
    progress: Progress | None = None  # once there is something to train

    @classmethod
    def of(cls, config: TrainConfig, before: Mapping[str, Any], began: float) -> "RunResult":
        """Goes on from `before`; a run that had ended as planned is not counted as a restart."""
        again = before.get("state") in ("running", "interrupted", "failed")
        return cls(
            before, settings_digest(config), began,
            restarts=before.get("restarts", 0) + again,
            steps_repeated=before.get("steps_repeated", 0),
            rollbacks=before.get("rollbacks", 0),
        )  # fmt: skip

    @property
    def wall_seconds_before(self) -> float:
        """Of all processes before this one."""
        return float(self.before.get("wall_seconds", 0.0))

    @property
    def wall_seconds(self) -> float:
        """Of all processes up to now."""
        return self.wall_seconds_before + time.monotonic() - self.began

    def goes_on(self, progress: Progress, reported_step: int = 0) -> None:
        """Counts what has to be done again: what was reached, as far as it was reported, past the step to go on from.

        `reported_step`: the last one in stats.jsonl. After a rollback it is known how far this process came.
        """
        reached = self.progress.step if self.progress else max(self.before.get("steps", 0), reported_step)
        self.steps_repeated += max(0, reached - progress.step)
        self.progress = progress

    def result(self, state: str, error: str | None = None) -> dict[str, Any]:
        """The content of result.json, but for epochs and final scalars."""
        return {
            "state": state,
            "error": error,
            **(self._reached(self.progress) if self.progress else {}),
            "wall_seconds": round(self.wall_seconds, 3),
            "peak_memory_gib": round(peak_memory_gib(), 3),
            **self._over_restarts(),
        }

    def _reached(self, progress: Progress) -> dict[str, Any]:
        started_up = progress.first_call_ended
        return {
            "steps": progress.step,
            "asked_steps": progress.asked_steps,
            "epochs": round(progress.epoch, 4),
            "startup_seconds": None
            if started_up is None
            else round(started_up - self.began, 3),  # to the first step's end
            "training_seconds": round(progress.training_seconds, 3),
            "images_per_second": rounded(progress.whole.images_per_second),
            "step_seconds": rounded(progress.whole.step_seconds),
        }

    def failed(self, error: str, exit_code: int, known: Mapping[str, Any]) -> dict[str, Any]:
        """The content of result.json for a run that stopped with `error`: what is `known` there already stays."""
        why = {"exit_code": exit_code, "settings": self.settings, "vertex_job": os.environ.get("CLOUD_ML_JOB_ID")}
        return {**known, **self.result("failed", error), **why}

    def _over_restarts(self) -> dict[str, Any]:
        saving = self.before.get("saving_seconds", 0.0) + self.saving_seconds
        return {
            "restarts": self.restarts,
            "steps_repeated": self.steps_repeated,
            "rollbacks": self.rollbacks,
            "saving_seconds": round(saving, 3),
        }


def refuse_hopeless_restart(config: TrainConfig, before: Mapping[str, Any]) -> None:
    """UserError where Vertex AI restarts, with the same settings, what the user must change first.

    It restarts whatever exits non-zero. At the desk the same command is tried again: what was missing may be there now.
    """
    same_job = before.get("vertex_job") and before["vertex_job"] == os.environ.get("CLOUD_ML_JOB_ID")
    if same_job and before.get("exit_code") == USER_MUST_CHANGE and before.get("settings") == settings_digest(config):
        log.warning("this job has failed before, and a restart with the same settings cannot mend it:")
        raise UserError(before.get("error") or "its error is not known: give the job again")


def settings_digest(config: TrainConfig) -> str:
    """Changes with any setting; the recipe's name is none."""
    return hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16]
