"""Tests that a Python call asks for what the command with the same flags asks for, here and on a
tier."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.api.compare import USAGE as COMPARE
from deploy.api.compare import CompareOptions
from deploy.api.plan import USAGE as PLAN
from deploy.api.plan import PlanOptions
from deploy.api.request import VerbRequest, call_verb, parse_verb
from deploy.api.submit import USAGE as SUBMIT
from deploy.api.submit import SubmitOptions
from tests.deploy.conftest import error_of
from trainer.base.errors import UserError
from trainer.base.settings.request import Overrides
from vertex_trainer import attach, compare, fit, jobs, plan, submit, train

# name, its value in Python, and the texts of its flags
SETTINGS: list[tuple[str, Any, list[str]]] = [
    ("augment", ["flip", "crop"], ["flip,crop"]),
    ("augment", "flip", ["flip"]),
    ("augment", "", [""]),
    ("track", ["wandb:a", "wandb:b"], ["wandb:a,wandb:b"]),
    ("class_weight", {0: 1, 1: 6.5}, ["0:1,1:6.5"]),
    ("learning_rate", None, []),
    ("learning_rate", "1e-3", ["1e-3"]),
    ("learning_rate", "", [""]),
    ("recipe", "", [""]),
    ("recipe", Path("mlp_mnist"), ["mlp_mnist"]),
    ("recipe", None, []),
    ("steps", "5", ["5"]),
    ("steps", "none", ["none"]),
    ("steps", "many", ["many"]),
    ("model", "", [""]),
    ("data", Path("a/b"), ["a/b"]),
    ("job_dir", "", [""]),
    ("tensorboard", "no", ["no"]),
    ("jit_compile", True, ["true"]),
]
OPTIONS: list[tuple[str, Any, list[str]]] = [
    ("region", ["us-central1", "us-east4"], ["us-central1,us-east4"]),
    ("region", None, []),
    ("bucket", "", [""]),
    ("labels", {"team": "vision", "cost": "42"}, ["team=vision,cost=42"]),
    ("max_cost", "20", ["20"]),
    ("max_cost", "", [""]),
    ("max_cost", "lots", ["lots"]),
    ("spot", "yes", ["yes"]),
    ("spot", None, []),
    ("timeout", "2h", ["2h"]),
    ("timeout", "7200", ["7200"]),
    ("include", ["a", "b"], ["a", "b"]),
    ("env", {"A": "b,c", "D": "e"}, ["A=b,c", "D=e"]),
    ("package", Path("mine.py"), ["mine.py"]),
    ("backend", "rest", ["rest"]),
]


def asked(request: Callable[[], VerbRequest[Any]]) -> Any:
    """Returns what a request asks for, or the line by which it is refused."""
    try:
        made = request()
    except UserError as error:
        return str(error)
    return made.options, made.program.values, made.command


@pytest.mark.parametrize(
    ("kind", "usage"), [(SubmitOptions, SUBMIT), (CompareOptions, COMPARE), (PlanOptions, PLAN)]
)
@pytest.mark.parametrize(("name", "value", "texts"), [*SETTINGS, *OPTIONS])
def test_a_call_is_the_command(
    kind: type, usage: Any, name: str, value: Any, texts: list[str]
) -> None:
    called = asked(lambda: call_verb(kind, ["l4x1"], {"seed": 7, name: value}, None, usage))
    in_settings = asked(lambda: call_verb(kind, ["l4x1"], {"seed": 7}, {name: value}, usage))
    words = ["l4x1", "--seed=7", *(f"--{name}={text}" for text in texts)]
    typed = asked(lambda: parse_verb(kind, words, usage))
    if isinstance(typed, str) and "unknown flag" in typed:
        assert "unknown keyword" in called
    else:
        assert called == in_settings == typed


@pytest.mark.parametrize(("name", "value", "texts"), SETTINGS)
def test_a_call_that_trains_here_is_the_command(name: str, value: Any, texts: list[str]) -> None:
    def values(read: Callable[[], Overrides]) -> Any:
        try:
            return read().values
        except UserError as error:
            return str(error)

    keywords = {key: given for key, given in {"seed": 7, name: value}.items() if given is not None}
    assert values(lambda: Overrides.read(keywords)) == values(
        lambda: Overrides.parse(["--seed=7", *(f"--{name}={text}" for text in texts)])
    )


CALLS: list[tuple[Any, dict[str, Any]]] = [
    (submit, {"max_cost": ["a"]}),
    (submit, {"learning_rate": ["a"]}),
    (submit, {"recipe": ""}),
    (plan, {"within": [8]}),
    (plan, {"recipe": ""}),
    (compare, {"recipe": ""}),
    (compare, {"repeats": "many"}),
    (fit, {"recipe": ""}),
    (fit, {"steps": ["a"]}),
    (fit, {"steps": "many", "on": "l4x1"}),
    (fit, {"on": ""}),
    (jobs, {"limit": "many"}),
    (jobs, {"state": ""}),
    (train, {"job_dir": ""}),
    (train, {"job_dir": "runs/x", "settings": {"steps": ""}}),
    (attach, {"region": "nowhere"}),
]


@pytest.mark.parametrize(("function", "keywords"), CALLS)
def test_a_wrong_value_is_one_line_of_every_function(
    function: Any, keywords: dict[str, Any]
) -> None:
    assert "\n" not in error_of(function, **keywords)


def test_a_plan_is_asked_in_the_units_of_the_command() -> None:
    from deploy.api.plan import Plan

    nothing: Any = None
    made = Plan(nothing, [], "a run", [], None, None, {})
    assert "within='8 hours' must be a time of up to 30 days with its unit" in error_of(
        made.best, within="8 hours"
    )
    assert "budget=-1.0 must be above 0" in error_of(made.best, budget=-1)
