"""Tests that a Python call asks for what the command with the same flags asks for, here and on a
tier."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.api.compare import USAGE as COMPARE
from deploy.api.compare import CompareOptions
from deploy.api.plan import USAGE as PLAN
from deploy.api.plan import PlanOptions
from deploy.api.request import VerbRequest, call_verb, parse_verb, verb_usage
from deploy.api.submit import USAGE as SUBMIT
from deploy.api.submit import SubmitOptions
from deploy.cli.local import LocalFlags
from tests.deploy.conftest import error_of
from tests.fixtures import Json
from trainer.base.errors import UserError
from vertex_trainer import attach, fit, jobs, plan, submit

# name, its value in Python, and the texts of its flags
SETTINGS: list[tuple[str, Any, list[str]]] = [
    ("augment", ["flip", "crop"], ["flip,crop"]),
    ("augment", "", [""]),
    ("track", ["wandb:a", "wandb:b"], ["wandb:a,wandb:b"]),
    ("class_weight", {0: 1, 1: 6.5}, ["0:1,1:6.5"]),
    ("learning_rate", None, []),
    ("learning_rate", "", [""]),
    ("recipe", Path("mlp_mnist"), ["mlp_mnist"]),
    ("steps", "none", ["none"]),
    ("steps", "many", ["many"]),
    ("data", Path("a/b"), ["a/b"]),
    ("tensorboard", "no", ["no"]),
    ("jit_compile", True, ["true"]),
]
OPTIONS: list[tuple[str, Any, list[str]]] = [
    ("region", ["us-central1", "us-east4"], ["us-central1,us-east4"]),
    ("bucket", "", [""]),
    ("labels", {"team": "vision", "cost": "42"}, ["team=vision,cost=42"]),
    ("max_cost", "", [""]),
    ("max_cost", "lots", ["lots"]),
    ("spot", "yes", ["yes"]),
    ("spot", None, []),
    ("timeout", "2h", ["2h"]),
    ("include", ["a", "b"], ["a", "b"]),
    ("env", {"A": "b,c", "D": "e"}, ["A=b,c", "D=e"]),
    ("package", Path("mine.py"), ["mine.py"]),
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
        assert "unknown setting" in called
    else:
        assert called == in_settings == typed
    if not isinstance(typed, str):  # the command that is shown asks for the same
        again = shlex.split(typed[2])[4:]
        assert asked(lambda: parse_verb(kind, again, usage)) == typed


def test_the_command_of_a_rehearsal_names_its_tier() -> None:
    words = ["l4x1", "--restarts=2", "--steps=5"]
    request = parse_verb(LocalFlags, words, verb_usage("local", "TIER", ""))
    assert request.command == "python -m deploy local l4x1 --restarts=2 --steps=5"


CALLS: list[tuple[Any, Json]] = [
    (submit, {"max_cost": ["a"]}),
    (plan, {"within": [8]}),
    (fit, {"recipe": ""}),
    (fit, {"steps": ["a"]}),
    (jobs, {"limit": "many"}),
    (attach, {"region": "nowhere"}),
]


@pytest.mark.parametrize(("function", "keywords"), CALLS)
def test_a_wrong_value_is_one_line_of_every_function(function: Any, keywords: Json) -> None:
    assert "\n" not in error_of(function, **keywords)
