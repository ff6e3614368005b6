"""Imports the functions that a run names, and finds out whether the user's own code raised an
exception, and where.

A function makes a model, data or callbacks, built in or the user's own, named by its dotted path.
The last frame in the user's own files decides whose mistake an exception is. TensorFlow keeps
frames as text in two cases: for code that AutoGraph rewrote (with the lines of the original
source), and for what failed in a graph (where its operation was created, and the traceback of a
Python function in it).
"""

import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

from trainer.base.errors import (
    FRAME,
    IN_USER_CODE,
    PlatformFault,
    UserError,
    reason,
    shortened,
    without_colours,
    without_frames,
)
from trainer.base.settings.fields import nearest_file
from trainer.base.settings.own_settings import functions_taking, refuse_missing_module
from trainer.base.settings.train_config import TrainConfig

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(
    path + os.sep
    for path in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|__autograph_generated_file|^<|\.pyx$")
# the user's folders and files, which a job may install among the libraries
_installed_by_user: set[str] = set()

_BLOCK = re.compile(r"(Traceback )?\(most recent call last\)")
# Errors that TensorFlow raises for a machine, a network or a driver, whoever wrote the operation
# that meets them.
_OF_THE_PLATFORM = (
    "AbortedError",
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "InternalError",
    "ResourceExhaustedError",
    "UnavailableError",
    "UnknownError",
)

_NO_FLOAT64 = re.compile(
    r"was expected to be a float tensor but is a double|type float32 that does not match type"
    r" float64"
    r"|type float64 that does not match (expected )?type (of )?float32"
)
OUT_OF_RANGE = re.compile(
    r"Received a label value of -?\d+ which is outside the valid range of \[0, \d+\)"
    r"|indices\[[\d,]+\] = -?\d+ is not in \[0, \d+\)"
)
_EAGER = "numpy() is only available when eager execution is enabled"
_OWN_LOOP = (
    "run a loop that reads values by NumPy as a script, on the same machines (docs/any_script.md)"
)

_Frame = tuple[str, int, str]  # file, line, function


def as_user_mistake(error: BaseException) -> UserError | None:
    """Returns the exception in a line with the user's file; None if other code raised it."""
    if isinstance(error, UserError | PlatformFault):
        return None
    if _NO_FLOAT64.search(message_of(error)):
        return UserError(
            f"{message_of(error)}: the model has an operation that TensorFlow or Keras does not"
            " have in float64: use --precision=float32"
        )
    raised = where_raised(error)
    if raised is None:
        value = OUT_OF_RANGE.search(str(error))
        return value and UserError(
            f"the data hold a number that the model does not allow: {value[0]}: classes must be"
            " from 0 to below the number of outputs, tokens from 0 to below the input_dim of their"
            " Embedding: change the data or the model"
        )
    place, cause = raised
    text = message_of(cause)
    text += f"; {_OWN_LOOP}" if _EAGER in text else nearest_file(text)
    return UserError(
        f"{place}: {text}; this is in your own code: fix it there, or change the flags that it"
        " reads (--verbose prints the whole traceback)"
    )


def where_raised(error: BaseException) -> tuple[str, BaseException] | None:
    """Returns where the user's code raised `error` or a cause, and that one; None otherwise.

    The place is text: `file:line in function`.
    """
    chain = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        for frames in _stacks(cause):
            for file, line, function in reversed(frames):
                path = os.path.abspath(file)
                installed = _INSTALLED.search(file) or path.startswith((_OURS, *_LIBRARIES))
                if not installed or path.startswith(tuple(_installed_by_user)):
                    inside = f" in {function}" if function and function != "<module>" else ""
                    return f"{path.removeprefix(os.getcwd() + os.sep)}:{line}{inside}", cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def _stacks(error: BaseException) -> Iterator[list[_Frame]]:
    """Yields lists of frames, each with the innermost last; the most specific list comes first."""
    # Types are compared by name: this module does not import TensorFlow.
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        yield [(error.filename, error.lineno or 1, "")]
    if "OpError" in names:
        # A block that begins with Traceback is of a Python function in the graph, which raised the
        # error; another block says where an operation was created.
        heads = [*_BLOCK.finditer(text)]
        ends = [*(head.start() for head in heads), len(text)][1:]
        tracebacks = list[str]()
        created = list[str]()
        for head, end in zip(heads, ends, strict=True):
            blocks = tracebacks if head[1] else created
            blocks.append(text[head.end() : end])
        yield from map(_frames_in_text, reversed(tracebacks))
        # Who created the operation is not to blame for a machine that fails.
        if names & {*_OF_THE_PLATFORM}:
            return
        yield from map(_frames_in_text, reversed(created))
    elif text.startswith(IN_USER_CODE):
        yield _frames_in_text(text)
    frames = traceback.walk_tb(error.__traceback__)
    yield _without_callers(
        [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]
    )


def _frames_in_text(text: str) -> list[_Frame]:
    return _without_callers(
        [(file, int(line), function) for file, line, function in FRAME.findall(text)]
    )


def _without_callers(frames: list[_Frame]) -> list[_Frame]:
    """Returns the frames from the first one of this package on: its caller made no mistake."""
    first = next(
        (at for at, frame in enumerate(frames) if os.path.abspath(frame[0]).startswith(_OURS)), 0
    )
    return frames[first:]


def message_of(error: BaseException) -> str:
    """Returns the type and the text of an exception on one line, without the frames in it."""
    text = without_colours(str(error))
    if isinstance(error, SyntaxError):
        text = str(error.msg)
    text = re.split(r"\[\[\{\{node|\[Op:", without_frames(text))[0]
    text = " ".join(text.split())
    text = re.sub(r"^\d+ root error\(s\) found\. \(0\) [A-Z_]+: ", "", text)
    text = re.sub(
        r"Exception encountered when calling [\w.]+\(\)\. (.*?) Arguments received by .*",
        r"\1",
        text,
    )
    typed = re.match(r"[A-Z]\w*(Error|Exception|Iteration|Interrupt|Exit|Warning)\b", text)
    return shortened((text if typed else f"{type(error).__name__}: {text}").rstrip(".: "))


def load_function(
    path: str, setting: str, takes: Sequence[str] | None = None, config: TrainConfig | None = None
) -> Callable[..., Any]:
    """Returns the function of `package.module:function`.

    takes: the names of the positional arguments with which it will be called; None if that need not
        be checked. config: has the values of the function's own settings; without them the
        function's defaults are used. Raises UserError, naming the setting, if there is no such
        function or if it cannot be called with these arguments.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise UserError(f"{setting}={path}: write it as package.module:function")
    # A console script does not import from the current folder, `python -m` does.
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    # The package's files are the user's, although they may be installed among the libraries; a
    # package that has been imported before is a library, or known already.
    top = module_name.partition(".")[0]
    with suppress(ImportError, ValueError):
        spec = None if top in sys.modules else importlib.util.find_spec(top)
        if spec and spec.origin:
            is_package = bool(spec.submodule_search_locations)
            _installed_by_user.add(
                os.path.dirname(spec.origin) + os.sep if is_package else spec.origin
            )
    refuse_missing_module(module_name, f"{setting}={path}")
    try:
        module = importlib.import_module(module_name)
    # TypeError: a relative name, as `.models`
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raised = where_raised(error)
        place = f"{raised[0]}: " if raised else ""
        raise UserError(
            f"{setting}={path}: cannot import {module_name} ({place}{reason(error)})"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{setting}={path}: {module_name} has no function {name}")
    keywords = {
        field.name: getattr(config, field.name)
        for field in (fields(config) if config else ())
        if setting in functions_taking(field)
    }
    with suppress(TypeError, ValueError):  # a function in C may have no signature
        signature = inspect.signature(function)
        try:
            if takes is not None:
                signature.bind(*takes, **keywords)
        except TypeError as error:
            called = ", ".join([*(takes or ()), *(f"{keyword}=" for keyword in keywords)])
            raise UserError(
                f"{setting}={path}: it is called with ({called}), but takes {signature}: {error}:"
                " change it to take these"
            ) from None
    return partial(function, **keywords)
