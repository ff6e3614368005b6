"""Imports a function by its dotted path: a model, a data source or callbacks, built in or the user's own."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from trainer.base.errors import UserError, reason
from trainer.base.settings.own_settings import taken_by
from trainer.base.settings.signatures import refuse_missing_module
from trainer.base.settings.train_config import TrainConfig
from trainer.user_code.mistakes import register_user_module, where_raised


def load_function(
    path: str, setting: str, takes: Sequence[str] | None = None, config: TrainConfig | None = None
) -> Callable[..., Any]:
    """Returns the function of `package.module:function`.

    `takes`: the names of the positional arguments with which it will be called; None if that need not be checked.
    `config`: gives the values of its own settings; one that no command line or recipe made has none, and the function's
    defaults hold. Raises UserError, naming the setting, if there is no such function, or it cannot be called so.
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
    names = [field.name for field in fields(config) if setting in taken_by(field)] if config else []
    keywords = {name: getattr(config, name) for name in names}
    return partial(_checked(function, takes, keywords, f"{setting}={path}"), **keywords)


def _checked(
    function: Callable[..., Any], takes: Sequence[str] | None, named: Mapping[str, Any], origin: str
) -> Callable[..., Any]:
    """Returns the function. Raises UserError if it cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C may have none
        return function
    try:
        if takes is not None:
            signature.bind(*takes, **named)
    except TypeError as error:
        called = ", ".join([*(takes or ()), *(f"{name}=" for name in named)])
        raise UserError(
            f"{origin}: it is called with ({called}), but takes {signature}: {error}: change it to take these"
        ) from None
    return function
