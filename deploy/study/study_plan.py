"""Holds what a study was asked for, and keeps the request in its folder: another study in it is refused."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.spec.job_spec import TrainingRequest, request_on
from deploy.spec.tier import Tier
from deploy.study.space import Parameter, Settings, configurations
from deploy.study.trials import TRIAL
from trainer.config import TrainConfig
from trainer.config.metric_names import FALLING, OF_IMAGES
from trainer.config.overrides import Overrides
from trainer.errors import UserError
from trainer.reporting.run_files import read_json
from trainer.storage import make_writable, write_whole
from trainer.storage.run_layout import RUN_INFO

STUDY = "study.json"
SENT_STUDY = "vertex.json"  # the job of Vertex AI that runs the study
GOALS = ("minimize", "maximize")
_MAY_CHANGE = ("trials", "parallel", "command", "pruning")  # of a study that has begun here


@dataclasses.dataclass(frozen=True)
class StudyPlan:
    """Holds a study's request. `command` is what the user typed; `goal` is one of GOALS."""

    tier: Tier
    overrides: Overrides
    space: tuple[Parameter, ...]
    metric: str
    goal: str
    trials: int
    parallel: int = 1
    repeats: int = 1
    pruning: bool = True
    command: str = ""

    def request(self, settings: Settings, repeat: int = 1) -> TrainingRequest:
        """Resolves a trial's settings. Raises UserError if the trainer would refuse them on the tier."""
        request = request_on(self.tier, self.overrides.replace(**settings, tuning_metric=self.metric))
        if repeat == 1:
            return request
        assert isinstance(request.config, TrainConfig), "a study has a recipe"
        return request_on(self.tier, request.overrides.replace(seed=request.config.seed + repeat - 1))

    @property
    def most_trials(self) -> int:
        """Returns the number of trials, which the space may limit."""
        return int(min(self.trials, configurations(self.space)))

    @property
    def first(self) -> Settings:
        """Returns the settings of some trial, where only those that all trials share matter."""
        return {parameter.name: parameter.samples()[0] for parameter in self.space}

    def asked(self, on: str) -> dict[str, Any]:
        """Returns the content of study.json."""
        return {
            "on": on,
            "tier": self.tier.name,
            "flags": self.overrides.arguments(),
            "tune": [parameter.text for parameter in self.space],
            "metric": self.metric,
            "goal": self.goal,
            "repeats": self.repeats,
            "trials": self.trials,
            "parallel": self.parallel,
            "pruning": self.pruning,
            "command": self.command,
        }


def goal_of(metric: str, given: str) -> str:
    """Returns whether the metric is to fall or to rise. Raises UserError if its name does not tell and none is given.

    A loss should fall and an accuracy rise, as for the trainer's best_metric.
    """
    if given:
        return given
    if metric.endswith("loss") or metric in FALLING:
        return "minimize"
    if "accuracy" in metric or metric in OF_IMAGES:
        return "maximize"
    raise UserError(
        f"metric={metric}: it is unknown whether higher or lower is better: add --goal=maximize or minimize"
    )


def check_study_folder(out: Path, asked: Mapping[str, Any]) -> None:
    """Raises UserError if `out` is not writable or holds something else than this study; creates no folder.

    More trials, others at a time and another pruning are allowed, but not for a job of Vertex AI.
    """
    make_writable(next((folder for folder in (out, *out.parents) if os.path.exists(folder)), out), "out")
    if (out / RUN_INFO).exists():
        raise UserError(f"out={out} holds a training run (run.json): use another --out")
    if not (any(out.glob(f"trial-*/{TRIAL}")) or (out / SENT_STUDY).exists()):
        return
    stored, problem = read_json(out / STUDY)
    if problem:
        raise UserError(f"{problem}, but the folder holds trials of unknown settings: use another --out")
    may_change = ("command",) if (out / SENT_STUDY).exists() else _MAY_CHANGE
    names = [name for name in asked if name not in may_change and stored.get(name) != asked[name]]
    if names:
        shown = "; ".join(f"{name}: {stored.get(name, 'unset')} stored, {asked[name]} given" for name in names)
        raise UserError(f"{out} holds another study ({shown}): use another --out")


def write_study(out: Path, asked: Mapping[str, Any]) -> None:
    """Writes study.json."""
    make_writable(out, "out")
    write_whole(out / STUDY, json.dumps(dict(asked), indent=2) + "\n")
