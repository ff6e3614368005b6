"""Imports a function by its dotted path: a model, a data source or callbacks, built in or the user's own."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from trainer.base.errors import UserError, reason
from trainer.base.settings.signatures import REQUIRED, Parameter, Unreadable, read_signature, refuse_missing_module
from trainer.base.settings.train_config import TrainConfig
from trainer.user_code.mistakes import register_user_module, where_raised


def load_function(
    path: str, setting: str, takes: Sequence[str] | None = None, config: TrainConfig | None = None
) -> Callable[..., Any]:
    """Returns the function of `package.module:function`.

    `takes`: the names of the positional arguments with which it will be called; None if that need not be checked.
    `config`: gives the values of its own settings, its keyword-only parameters. Raises UserError, naming the setting,
    if there is no such function, it cannot be called so, or it has other parameters than its source shows.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise UserError(f"{setting}={path}: write it as package.module:function")
    if os.getcwd() not in sys.path:  # a console script does not import from the current folder, `python -m` does
        sys.path.insert(0, os.getcwd())
    register_user_module(module_name)
    refuse_missing_module(module_name, f"{setting}={path}")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:  # TypeError: a relative name, as `.models`
        line = where_raised(error)
        place = f"{line[0]}: " if line else ""
        raise UserError(f"{setting}={path}: cannot import {module_name} ({place}{reason(error)})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{setting}={path}: {module_name} has no function {name}")
    if config is None:
        return _checked(function, takes, {}, f"{setting}={path}")
    try:
        parameters = read_signature(path, f"{setting}={path}").parameters
    except Unreadable:  # then it has no settings: its parameters keep their defaults
        return _checked(function, takes, {}, f"{setting}={path}")
    _check_agreement(function, parameters, f"{setting}={path}")
    # A config that was not made of a command line has none of these settings.
    values = {parameter.name: getattr(config, parameter.name, parameter.default) for parameter in parameters}
    keywords = {name: value for name, value in values.items() if value is not REQUIRED}
    return partial(_checked(function, takes, keywords, f"{setting}={path}"), **keywords)


def _checked(
    function: Callable[..., Any], takes: Sequence[str] | None, named: Mapping[str, Any], origin: str
) -> Callable[..., Any]:
    """Returns the function. Raises UserError if it cannot be called with these arguments."""
    signature = _signature(function)
    if takes is None or signature is None:
        return function
    try:
        signature.bind(*takes, **named)
    except TypeError as error:
        called = ", ".join([*takes, *(f"{name}=" for name in named)])
        raise UserError(f"{origin}: it is called with ({called}), but takes {signature}: {error}") from None
    return function


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a function in C may have none
        return None


def _check_agreement(function: Callable[..., Any], parameters: Sequence[Parameter], origin: str) -> None:
    """Raises UserError if the imported function has other keyword-only parameters or defaults than its source shows.

    A decorator may hide them behind `**kwargs`.
    """
    signature = _signature(function)
    if signature is None:
        return
    empty, kinds = inspect.Parameter.empty, [parameter.kind for parameter in signature.parameters.values()]
    expected = {part.name: empty if part.default is REQUIRED else part.default for part in parameters}
    keywords = [part for part in signature.parameters.values() if part.kind is part.KEYWORD_ONLY]
    actual = {part.name: part.default for part in keywords if part.name[0] != "_"}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        actual = expected | actual
    if actual != expected:
        names = [name for name in {**expected, **actual} if actual.get(name, actual) != expected.get(name, expected)]
        raise UserError(
            f"{origin}: once imported it takes {signature}, but its source shows other keyword-only parameters "
            f"({', '.join(names)}): define it once, by a `def` without a decorator that changes them"
        )
