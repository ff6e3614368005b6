"""Reads and writes the trials of a study's folder: each is a folder with its settings and its job directories."""

import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.comparison.directory import is_done
from deploy.report.collection import repeat_folder
from trainer.errors import UserError
from trainer.reporting.run_files import mapping, number, read_json, read_result, read_stats
from trainer.storage import write_whole

TRIAL = "trial.json"
STATES = ("complete", "pruned", "running", "killed", "failed")


@dataclass(frozen=True)
class Trial:
    """Holds one trial. `values`: the metric at the end of each repeat; `reports`: all of the first repeat, in order."""

    number: int  # from 1
    settings: Mapping[str, Any]
    state: str  # one of STATES
    values: tuple[float, ...] = ()
    reports: tuple[float, ...] = ()
    reason: str = ""  # why it failed, was pruned or killed
    seconds: float = 0.0  # of all its processes

    @property
    def value(self) -> float | None:
        """Returns the mean of the repeats."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Returns the standard deviation between repeats; None of fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def trial_name(number: int) -> str:
    """Returns the name of a trial's folder."""
    return f"trial-{number:03d}"


def job_dirs(out: Path, number: int, repeats: int) -> list[Path]:
    """Returns the job directories of a trial."""
    return [repeat_folder(out, trial_name(number), repeat) for repeat in range(1, repeats + 1)]


def write_trial(out: Path, number: int, settings: Mapping[str, Any], ended: str = "", reason: str = "") -> None:
    """Records a trial before it starts and, with `ended` (pruned or failed), that it is not to be resumed.

    A reason without `ended` states what killed it.
    """
    file = out / trial_name(number) / TRIAL
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps({"settings": dict(settings), "ended": ended, "reason": reason}, indent=2) + "\n")


def read_trials(out: Path, metric: str, repeats: int, running: Collection[int] = ()) -> list[Trial]:
    """Returns the trials in `out`, by number. `running`: the numbers of those that a process works on now.

    Raises UserError for a damaged trial.json.
    """
    files = sorted(out.glob(f"trial-*/{TRIAL}"), key=lambda file: (len(file.parent.name), file.parent.name))
    return [_read(file, metric, repeats, running) for file in files]


def _read(file: Path, metric: str, repeats: int, running: Collection[int]) -> Trial:
    content, problem = read_json(file)
    digits = file.parent.name.removeprefix("trial-")
    settings = content.get("settings")
    if problem or not digits.isdecimal() or not isinstance(settings, dict) or not settings:
        raise UserError(f"{file} is damaged: remove its folder: the trial is then run again") from None
    return read_trial(file.parents[1], int(digits), content, metric, repeats, running)


def read_trial(
    out: Path, number_: int, content: Mapping[str, Any], metric: str, repeats: int, running: Collection[int]
) -> Trial:
    """Returns a trial, of the `content` of its trial.json and of its job directories."""
    folders = job_dirs(out, number_, repeats)
    done = [folder for folder in folders if is_done(folder)]
    reports = [metric_reports(folder, metric) for folder in folders]
    values = tuple(found[-1] for folder, found in zip(folders, reports, strict=True) if found and folder in done)
    ended, reason = str(content.get("ended") or ""), str(content.get("reason") or "")
    state = ended if ended in STATES else "running" if number_ in running else "killed"
    if state == "killed" and len(done) == repeats:
        state, reason = ("complete", "") if len(values) == repeats else ("failed", f"it never reported {metric}")
    if state == "pruned" and reports[0]:
        values = (reports[0][-1],)
    if state == "killed":
        reason = reason or "it has not ended: the same command resumes it"
    seconds = sum(number(read_result(folder)[0].get("wall_seconds")) or 0.0 for folder in folders)
    return Trial(number_, content["settings"], state, values, tuple(reports[0]), reason, seconds)


def metric_reports(job_dir: Path, metric: str) -> list[float]:
    """Returns the metric's values in stats.jsonl, as the trainer reports them to hyperparameter tuning.

    That is without the means over an epoch, of which each step was reported already.
    """
    entries = [entry for entry in read_stats(job_dir)[0] if entry["kind"] != "epoch"]
    found = [{**mapping(entry, "losses"), **mapping(entry, "metrics")}.get(metric) for entry in entries]
    return [value for one in found if (value := number(one)) is not None]


def best_first(trials: Sequence[Trial], goal: str) -> list[Trial]:
    """Returns the trials, the best complete ones first, then the others by state and number; ties by number."""
    sign = -1.0 if goal == "maximize" else 1.0

    def key(trial: Trial) -> tuple[int, float, int]:
        return STATES.index(trial.state), sign * (trial.value or 0.0) if trial.state == "complete" else 0, trial.number

    return sorted(trials, key=key)
