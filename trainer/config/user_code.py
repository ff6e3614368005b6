"""Imports a function by its dotted path: a model, a data source or callbacks, built in or the user's own."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from trainer.errors import UserError, reason
from trainer.user_mistakes import register_user_module, where_raised


def load_function(path: str, setting: str, takes: Sequence[str] | None = None) -> Callable[..., Any]:
    """Returns the function of `package.module:function`.

    `takes`: the names of the positional arguments with which it will be called; None if that need not be checked.
    Raises UserError, naming the setting, if there is no such function or it cannot be called so.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise UserError(f"{setting}={path}: write it as package.module:function")
    if os.getcwd() not in sys.path:  # a console script does not import from the current folder, `python -m` does
        sys.path.insert(0, os.getcwd())
    register_user_module(module_name)
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:  # TypeError: a relative name, as `.models`
        found = where_raised(error)
        place = f"{found[0]}: " if found else ""
        raise UserError(f"{setting}={path}: cannot import {module_name} ({place}{reason(error)})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{setting}={path}: {module_name} has no function {name}")
    if takes is not None:
        _check_arguments(function, takes, f"{setting}={path}")
    return function


def _check_arguments(function: Callable[..., Any], takes: Sequence[str], origin: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C may have none
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        raise UserError(f"{origin}: it is called with ({', '.join(takes)}), but takes {signature}: {error}") from None
