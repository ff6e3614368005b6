"""Keeps the trials of a study in a journal of Optuna, and proposes the settings of the next one.

A trial is an `optuna.trial.FrozenTrial`, wherever it ran. Its attributes: `values`, the metric at the end of each
repeat; `seconds` of all its processes; `reason`, why it failed, was pruned or has not ended. https://optuna.org
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.study.space import StudyParameter, TrialSettings, configurations
from deploy.study.study_request import JOURNAL
from trainer.base.errors import UserError
from trainer.base.storage import writing

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

_RANDOM = 5  # trials at random before the sampler models the metric, and before any trial is pruned
_ATTEMPTS = 100  # at settings that no other trial has


def load() -> Any:
    """Returns the module optuna. Raises UserError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UserError("a study needs Optuna: pip install optuna (or '.[tune]')") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_journal(out: Path, goal: str) -> "Study":
    """Returns the study that `out` keeps, new if there is none. The caller has locked `out`.

    What a killed process may have left there goes: the journal's lock, and a line that was not written to its end.
    Raises UserError for a damaged journal.
    """
    optuna, file = load(), out / JOURNAL
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    with writing(file):
        (out / f"{JOURNAL}.lock").unlink(missing_ok=True)
        if file.exists():
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=_RANDOM, n_warmup_steps=1)
    try:
        storage = JournalStorage(JournalFileBackend(str(file)))
        return optuna.create_study(
            storage=storage, pruner=pruner, study_name="study", direction=goal, load_if_exists=True
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}): use another --out") from None


def frozen_trial(
    number: int, state: str, space: Sequence[StudyParameter], settings: Mapping[str, Any],
    values: Sequence[float] = (), reports: Sequence[float] = (), **attributes: Any,
) -> "FrozenTrial":  # fmt: skip
    """Returns a trial, numbered from 1, as Optuna holds it. `state`: the name of a TrialState.

    Reports are numbered, so that the pruner compares equal shares of the work.
    """
    trial = load().trial.create_trial(
        state=load().trial.TrialState[state],
        value=statistics.fmean(values) if values and state in ("COMPLETE", "PRUNED") else None,
        params=dict(settings),
        distributions={name: limits for name, limits in _distributions(space).items() if name in settings},
        user_attrs={"values": list(values), **attributes},
        intermediate_values=dict(enumerate(reports)),
    )
    trial.number = number - 1
    return trial


def in_memory(goal: str, trials: Sequence["FrozenTrial"], **options: Any) -> "Study":
    """Returns a study of `trials`, with a failed one before them, so that figures count them from 1."""
    study = load().create_study(direction=goal, **options)
    study.add_trials([frozen_trial(0, "FAIL", (), {}), *sorted(trials, key=lambda trial: trial.number)])
    return study


def propose(space: Sequence[StudyParameter], trials: Sequence["FrozenTrial"], goal: str, seed: int) -> TrialSettings:
    """Returns settings that none of `trials` has; empty if none are left, or many attempts gave none.

    goal: minimize or maximize. The same trials and seed give the same settings.
    """
    samplers, taken = load().samplers, [trial.params for trial in trials]
    seed += len(trials)
    model = samplers.TPESampler(seed=seed, n_startup_trials=_RANDOM, constant_liar=True)
    study = in_memory(goal, trials, sampler=model)
    for attempt in range(_ATTEMPTS if len(taken) < configurations(space) else 0):
        if attempt == _ATTEMPTS // 2:  # the model insists on what was tried
            study.sampler = samplers.RandomSampler(seed=seed)
        settings = _rounded(study.ask(_distributions(space)).params, space)
        if settings not in taken:
            return settings
    return {}


def _rounded(settings: TrialSettings, space: Sequence[StudyParameter]) -> TrialSettings:
    """Returns the settings with fractions of four digits, as a person would write them, within their ranges."""
    for limits in space:
        if limits.kind is float and not limits.values:
            near = float(f"{settings[limits.name]:.4g}")
            settings[limits.name] = min(max(near, limits.low), limits.high)
    return settings


def _distributions(space: Sequence[StudyParameter]) -> dict[str, Any]:
    kinds = load().distributions
    of_numbers = {int: kinds.IntDistribution, float: kinds.FloatDistribution}
    return {
        setting.name: kinds.CategoricalDistribution(setting.values)
        if setting.values
        else of_numbers[setting.kind](setting.low, setting.high, log=setting.log)
        for setting in space
    }
