"""Holds what a study was asked for, and keeps the request in its folder: another study in it is refused."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.comparison.directory import check_no_run, refuse_other
from deploy.comparison.sent_job import SENT_JOB
from deploy.study.space import StudyParameter, TrialSettings, configurations
from deploy.tiers.job_request import TrainingRequest
from deploy.tiers.job_spec import training_on
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError
from trainer.base.run_files.records import read_json
from trainer.base.settings.metric_names import FALLING, OF_IMAGES
from trainer.base.settings.resolution import Overrides
from trainer.base.storage import make_writable, write_whole

STUDY_FILE = "study.json"
JOURNAL = "journal.log"  # of Optuna: the trials here
OLD_TRIALS = "trial-*/trial.json"  # of the older form, without a journal: its table.md and table.json are there
GOALS = ("minimize", "maximize")
_MAY_CHANGE = ("trials", "parallel", "command", "pruning")  # of a study that has begun here


@dataclasses.dataclass(frozen=True)
class StudyRequest:
    """Holds a study's request. `command` is what the user typed; `goal` is one of GOALS."""

    tier: Tier
    overrides: Overrides
    space: tuple[StudyParameter, ...]
    metric: str
    goal: str
    trials: int
    parallel: int = 1
    repeats: int = 1
    pruning: bool = True
    command: str = ""

    def request(self, settings: TrialSettings, repeat: int = 1) -> TrainingRequest:
        """Resolves a trial's settings. Raises UserError if the trainer would refuse them on the tier."""
        request = training_on(self.tier, self.overrides.replace(**settings, tuning_metric=self.metric))
        if repeat == 1:
            return request
        return training_on(self.tier, request.overrides.replace(seed=request.config.seed + repeat - 1))

    @property
    def most_trials(self) -> int:
        """Returns the number of trials, which the space may limit."""
        return int(min(self.trials, configurations(self.space)))

    @property
    def first(self) -> TrialSettings:
        """Returns the settings of some trial, where only those that all trials share matter."""
        return {parameter.name: parameter.samples()[0] for parameter in self.space}

    def summary(self, on: str) -> dict[str, Any]:
        """Returns the content of study.json."""
        names = ("metric", "goal", "repeats", "trials", "parallel", "pruning", "command")
        of_space = [parameter.text for parameter in self.space]
        about = {"on": on, "tier": self.tier.name, "flags": self.overrides.arguments(), "tune": of_space}
        return {**about, **{name: getattr(self, name) for name in names}}


def goal_of(metric: str, goal: str) -> str:
    """Returns whether the metric is to fall or to rise: a loss falls, an accuracy rises, as for best_metric.

    Raises UserError if its name does not tell and `goal` is empty.
    """
    falls, rises = metric.endswith("loss") or metric in FALLING, "accuracy" in metric or metric in OF_IMAGES
    if not (goal or falls or rises):
        raise UserError(
            f"metric={metric}: it is unknown whether higher or lower is better: add --goal=maximize or minimize"
        )
    return goal or ("minimize" if falls else "maximize")


def check_study_folder(out: Path, request: Mapping[str, Any]) -> None:
    """Raises UserError if `out` is not writable or holds something else than this study; creates no folder.

    More trials, others at a time and another pruning are allowed, but not for a job of Vertex AI.
    """
    check_no_run(out)
    sent = (out / SENT_JOB).exists()
    if not (sent or (out / JOURNAL).exists()):
        if any(out.glob(OLD_TRIALS)):
            raise UserError(f"{out} holds a study of the older form, which is not continued: use another --out")
        return
    stored, problem = read_json(out / STUDY_FILE)
    if problem:
        raise UserError(f"{problem}, but the folder holds trials of unknown settings: use another --out")
    may_change = ("command",) if sent else _MAY_CHANGE
    refuse_other(out, "study", stored, request, [name for name in request if name not in may_change])


def write_study(out: Path, request: Mapping[str, Any]) -> None:
    """Writes study.json."""
    make_writable(out, "out")
    write_whole(out / STUDY_FILE, json.dumps(dict(request), indent=2) + "\n")
