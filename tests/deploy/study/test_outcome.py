"""Tests that proposals are functions of the trials so far, and what is said of trials that are over."""

import dataclasses
from typing import TYPE_CHECKING

import pytest

from deploy.study.optuna_study import frozen_trial, load, propose
from deploy.study.outcome import StudyOutcome
from deploy.study.space import StudyParameter, TrialSettings
from deploy.study.study_request import StudyRequest
from deploy.tiers.tier import load_tier
from tests.deploy.study.conftest import OWN
from trainer.base.errors import UserError
from trainer.base.settings.resolution import Overrides

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

pytest.importorskip("optuna")
SPACE = (
    StudyParameter("x", float, (), 0.0, 10.0),
    StudyParameter("kind", str, ("a", "b")),
    StudyParameter("n", int, (), 1, 64, True),
)


def complete(number: int, *values: float, settings: TrialSettings | None = None) -> "FrozenTrial":
    settings = settings or {"x": float(number), "kind": "a", "n": 1}
    return frozen_trial(number, "COMPLETE", SPACE, settings, values, seconds=60.0)


def test_the_same_trials_and_seed_give_the_same_settings_within_the_space() -> None:
    trials: list[FrozenTrial] = []
    for number in range(1, 13):
        settings = propose(SPACE, trials, "minimize", 7)
        assert settings == propose(SPACE, trials, "minimize", 7)
        assert settings not in [trial.params for trial in trials]
        assert 0 <= settings["x"] <= 10
        assert len(f"{settings['x']:.10g}") <= 6, "four digits, as a person would write"
        assert settings["kind"] in ("a", "b")
        assert settings["n"] in range(1, 65)
        state = ("COMPLETE", "FAIL", "PRUNED", "RUNNING")[number % 4]
        trials.append(frozen_trial(number, state, SPACE, settings, [settings["x"]] if state == "COMPLETE" else []))
    assert propose(SPACE, trials, "minimize", 8) != propose(SPACE, trials, "minimize", 7)


def test_every_configuration_is_tried_once() -> None:
    space = (StudyParameter("a", bool, (True, False)), StudyParameter("b", int, (), 1, 3))
    trials: list[FrozenTrial] = []
    while settings := propose(space, trials, "maximize", 0):
        trials.append(frozen_trial(len(trials) + 1, "COMPLETE", space, settings, [1.0]))
    assert len(trials) == 6


def test_the_verdict_says_what_is_not_known() -> None:
    space = (StudyParameter("x", float, (), 0.0, 10.0),)
    overrides = Overrides.parse([f"--model={OWN}:build", f"--data={OWN}:data"])  # its own x is 9
    plan = StudyRequest(load_tier("cpu"), overrides, space, "loss", "minimize", 9)
    usual, better = complete(1, 5.0, settings={"x": 9.0}), complete(2, 4.0, settings={"x": 2.0})
    outcome = StudyOutcome([usual, better], plan, "train")
    assert outcome.verdict() == [
        "Best: trial 2, loss 4.000: x=2.0.", "2 trials: 2 complete.",
        "It is better than the recipe's own settings (trial 1: 5.000) by 1.00.",
    ]  # fmt: skip
    assert outcome.best_command == "train --x=2.0"
    worse = dataclasses.replace(outcome, plan=dataclasses.replace(plan, goal="maximize"))
    assert worse.verdict()[2] == "No trial was better than the recipe's own settings (trial 1: 5.000)."
    noisy = [complete(1, 4.0, 6.0, settings={"x": 9.0}), complete(2, 3.0, 5.0, settings={"x": 2.0})]
    unclear = dataclasses.replace(outcome, trials=noisy, plan=dataclasses.replace(plan, repeats=2))
    assert unclear.verdict()[2].startswith("It is not clearly better than the recipe's own settings")
    assert unclear.verdict()[3] == "Trial 1 is within its spread."
    assert unclear.rows()[1][0][:4] == ["2", "complete", "4.000 ± 1.4", "2"]
    equal = dataclasses.replace(outcome, trials=[usual, *(complete(number, 5.0) for number in (2, 3))])
    assert equal.verdict()[-1] == "Trials 2, 3 are equal to it."
    failed = dataclasses.replace(outcome, trials=[frozen_trial(1, "FAIL", space, {"x": 9.0}, seconds=1.0)])
    assert failed.verdict() == ["1 trials: 1 failed.", "No trial is complete: there is no best one."]


def test_a_missing_optuna_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(UserError, match="needs Optuna: pip install optuna"):
        load()
