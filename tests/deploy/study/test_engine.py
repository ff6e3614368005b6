"""Tests that proposals and pruning are functions of the trials so far."""

import dataclasses

import pytest

from deploy.study.engine import is_hopeless, propose
from deploy.study.outcome import Outcome
from deploy.study.space import Parameter, Settings
from deploy.study.trials import Trial

pytest.importorskip("optuna")
SPACE = [Parameter("x", float, (), 0.0, 10.0), Parameter("kind", str, ("a", "b")), Parameter("n", int, (), 1, 64, True)]


def complete(number: int, value: float, settings: Settings | None = None) -> Trial:
    settings = settings or {"x": float(number), "kind": "a", "n": 1}
    return Trial(number, settings, "complete", (value,), (value + 2, value + 1, value))


def test_the_same_trials_and_seed_give_the_same_settings_within_the_space() -> None:
    trials: list[Trial] = []
    for number in range(1, 13):
        settings = propose(SPACE, trials, "minimize", 7)
        assert settings == propose(SPACE, trials, "minimize", 7)
        assert settings is not None
        assert settings not in [trial.settings for trial in trials]
        assert 0 <= settings["x"] <= 10
        assert len(f"{settings['x']:.10g}") <= 6, "four digits, as a person would write"
        assert settings["kind"] in ("a", "b")
        assert settings["n"] in range(1, 65)
        states = ("complete", "failed", "pruned", "killed")
        trials.append(dataclasses.replace(complete(number, settings["x"], settings), state=states[number % 4]))
    assert propose(SPACE, trials, "minimize", 8) != propose(SPACE, trials, "minimize", 7)


def test_every_configuration_is_tried_once() -> None:
    space, trials = [Parameter("a", bool, (True, False)), Parameter("b", int, (), 1, 3)], list[Trial]()
    while (settings := propose(space, trials, "maximize", 0)) is not None:
        trials.append(complete(len(trials) + 1, 1.0, settings))
    assert len(trials) == 6


@pytest.mark.parametrize(
    ("reports", "goal", "hopeless"),
    [
        ((99.0,), "minimize", False),  # the first report may be anything
        ((99.0, 99.0), "minimize", True),
        ((99.0, 3.0), "minimize", False),
        ((99.0, 99.0), "maximize", False),
        ((0.0, 0.0), "maximize", True),
        ((), "minimize", False),
    ],
)
def test_a_trial_worse_than_the_median_is_hopeless(reports: tuple[float, ...], goal: str, hopeless: bool) -> None:
    others = [complete(number, float(number)) for number in range(1, 6)]
    trial = Trial(9, {"x": 1.5, "kind": "a", "n": 2}, "running", (), reports)
    assert is_hopeless(trial, [*others, trial], goal) == hopeless
    assert not is_hopeless(trial, [*others[:4], trial], goal), "too few to judge by"


def test_the_verdict_says_what_is_not_known() -> None:
    names, default = ("x",), {"x": 1.0}
    own, better = complete(1, 5.0, default), complete(2, 4.0, {"x": 2.0})
    outcome = Outcome((own, better), names, "loss", "minimize", default=default, command="train")
    assert outcome.verdict() == [
        "Best: trial 2, loss 4.000: x=2.0.", "2 trials: 2 complete.",
        "It is better than the recipe's own settings (trial 1: 5.000) by 1.00.",
    ]  # fmt: skip
    assert outcome.best_command == "train --x=2.0"
    worse = dataclasses.replace(outcome, goal="maximize")
    assert worse.verdict()[2] == "No trial was better than the recipe's own settings (trial 1: 5.000)."
    noisy = tuple(dataclasses.replace(one, values=(one.values[0] - 1, one.values[0] + 1)) for one in (own, better))
    unclear = dataclasses.replace(outcome, trials=noisy, repeats=2)
    assert unclear.verdict()[2].startswith("It is not clearly better than the recipe's own settings")
    assert unclear.verdict()[3] == "Trial 1 is within its spread."
    equal = dataclasses.replace(outcome, trials=(own, complete(2, 5.0), complete(3, 5.0)))
    assert equal.verdict()[-1] == "Trials 2, 3 are equal to it."
    failed = dataclasses.replace(outcome, trials=(dataclasses.replace(own, state="failed"),))
    assert failed.verdict() == ["1 trials: 1 failed.", "No trial is complete: there is no best one."]
