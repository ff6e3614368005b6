"""Imports a function by its dotted path: a model, a data source or callbacks, built in or the user's own."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from trainer.errors import UserError, reason


def load_function(path: str, setting: str) -> Callable[..., Any]:
    """Returns the function of `package.module:function`. Raises UserError, naming the setting, if there is none."""
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise UserError(f"{setting}={path}: write it as package.module:function")
    if os.getcwd() not in sys.path:  # a console script does not import from the current folder, `python -m` does
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:  # TypeError: a relative name, as `.models`
        raise UserError(f"{setting}={path}: cannot import {module_name} ({reason(error)})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{setting}={path}: {module_name} has no function {name}")
    return function
