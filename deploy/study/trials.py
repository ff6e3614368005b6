"""Names the folders of a study's trials, reads what their runs reported, and reads studies of the older form."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.comparison.directory import is_done
from deploy.report.collection import repeat_folder
from deploy.study.optuna_study import frozen_trial
from deploy.study.study_request import OLD_TRIALS, StudyRequest
from trainer.base.errors import UserError
from trainer.base.run_files.records import mapping, number, read_json, read_result, read_stats

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


def trial_name(number: int) -> str:
    """Returns the name of a trial's folder, as the trial's number counts from 1."""
    return f"trial-{number:03d}"


def job_dirs(out: Path, number: int, repeats: int) -> list[Path]:
    """Returns the job directories of a trial."""
    return [repeat_folder(out, trial_name(number), repeat) for repeat in range(1, repeats + 1)]


def metric_reports(job_dir: Path, metric: str) -> list[float]:
    """Returns the metric's values in stats.jsonl, as the trainer reports them to hyperparameter tuning.

    That is without the means over an epoch, of which each step was reported already.
    """
    entries = [entry for entry in read_stats(job_dir)[0] if entry["kind"] != "epoch"]
    reported = [{**mapping(entry, "losses"), **mapping(entry, "metrics")}.get(metric) for entry in entries]
    return [value for value in map(number, reported) if value is not None]


def end_of(folders: Sequence[Path], metric: str) -> tuple[list[float], float]:
    """Returns the metric at the end of each run that is done and reported it, and the seconds of all runs."""
    values = [reports[-1] for folder in folders if is_done(folder) and (reports := metric_reports(folder, metric))]
    return values, sum(number(read_result(folder)[0].get("wall_seconds")) or 0.0 for folder in folders)


def read_old_trials(out: Path, plan: StudyRequest) -> Iterator["FrozenTrial"]:
    """Yields the trials of a study of the older form, each of a trial.json. Raises UserError if one is damaged."""
    for file in sorted(out.glob(OLD_TRIALS)):
        try:
            yield _read_old(out, int(file.parent.name.removeprefix("trial-")), read_json(file)[0], plan)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{file} is damaged: remove its folder, and the other trials are reported") from None


def _read_old(out: Path, trial: int, content: Mapping[str, Any], plan: StudyRequest) -> "FrozenTrial":
    folders = job_dirs(out, trial, plan.repeats)
    (values, seconds), reports = end_of(folders, plan.metric), metric_reports(folders[0], plan.metric)
    state = "COMPLETE" if len(values) == plan.repeats else "FAIL" if all(map(is_done, folders)) else "RUNNING"
    state = {"pruned": "PRUNED", "failed": "FAIL"}.get(content["ended"], state)
    values = reports[-1:] if state == "PRUNED" else values
    attributes = {"reason": content["reason"], "seconds": seconds}
    return frozen_trial(trial, state, plan.space, content["settings"], values, reports, **attributes)
