"""Chooses the settings of the next trial, and which trial to end early, with Optuna: https://optuna.org

Both are functions of the trials so far, which are read from their folders: no data base can contradict these.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deploy.study.space import Parameter, Settings, configurations
from deploy.study.trials import Trial
from trainer.errors import UserError

if TYPE_CHECKING:
    import optuna

_RANDOM = 5  # trials at random before the sampler models the metric, and before any trial is pruned
_ATTEMPTS = 100  # at settings that no other trial has


def load() -> Any:
    """Returns the module optuna. Raises UserError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UserError("a study on this machine needs Optuna: pip install optuna (or '.[tune]')") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def propose(space: Sequence[Parameter], trials: Sequence[Trial], goal: str, seed: int) -> Settings | None:
    """Returns settings that none of `trials` has; None if none are left, or none were found in many attempts.

    goal: minimize or maximize. The same trials and seed give the same settings.
    """
    optuna, distributions = load(), _distributions(space)
    past = [_frozen(trial, distributions) for trial in trials]
    taken = [dict(trial.settings) for trial in trials]
    if len({tuple(settings.items()) for settings in taken}) >= configurations(space):
        return None
    for attempt in range(_ATTEMPTS):
        number = seed + 1_000 * attempt + len(trials)
        sampler = optuna.samplers.TPESampler(seed=number, n_startup_trials=_RANDOM, constant_liar=True)
        if attempt > _ATTEMPTS // 2:  # the model insists on what was tried
            sampler = optuna.samplers.RandomSampler(seed=number)
        study = optuna.create_study(direction=goal, sampler=sampler)
        study.add_trials(past)
        settings = _rounded(study.ask(distributions).params, space)
        if settings not in taken:
            return settings
    return None


def _rounded(settings: Settings, space: Sequence[Parameter]) -> Settings:
    """Returns the settings with fractions of four digits, as a person would write them, within their ranges."""
    ranges = {one.name: one for one in space if one.kind is float and not one.values}
    near = {name: float(f"{settings[name]:.4g}") for name in ranges}
    return {**settings, **{name: min(max(near[name], one.low), one.high) for name, one in ranges.items()}}


def is_hopeless(trial: Trial, trials: Sequence[Trial], goal: str) -> bool:
    """Returns whether the trial's best report is worse than the median of the others after as many reports."""
    if not trial.reports:
        return False
    optuna = load()
    study = optuna.create_study(direction=goal)
    study.add_trials([_frozen(other, {}) for other in trials if other.state == "complete" and other is not trial])
    pruner = optuna.pruners.MedianPruner(n_startup_trials=_RANDOM, n_warmup_steps=1)
    return bool(pruner.prune(study, _frozen(trial, {})))


def _distributions(space: Sequence[Parameter]) -> dict[str, Any]:
    kinds = load().distributions
    found: dict[str, Any] = {}
    for one in space:
        if one.values:
            found[one.name] = kinds.CategoricalDistribution(one.values)
        elif one.kind is int:
            found[one.name] = kinds.IntDistribution(int(one.low), int(one.high), log=one.log)
        else:
            found[one.name] = kinds.FloatDistribution(one.low, one.high, log=one.log)
    return found


def _frozen(trial: Trial, distributions: Mapping[str, Any]) -> "optuna.trial.FrozenTrial":
    """Returns the trial as Optuna stores it; its reports are numbered, so that equal shares of the work compare."""
    trials = load().trial
    states = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
    state = trials.TrialState[states.get(trial.state, "RUNNING")]
    return trials.create_trial(
        state=state,
        value=trial.value if trial.state == "complete" else None,
        params=dict(trial.settings) if distributions else {},
        distributions=dict(distributions),
        intermediate_values=dict(enumerate(trial.reports)),
    )
