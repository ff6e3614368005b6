"""Tests how commands end: exit codes and one line."""

import functools
import importlib
import operator
import sys
from collections.abc import Callable
from typing import Any

from tests.fixtures import Capture, parametrize
from trainer import check, generate, task
from trainer.base.errors import PlatformFault, UserError
from trainer.data import prepare
from trainer.user_code.command import command


def raising(error: BaseException) -> Callable[..., int]:
    def work(arguments: object) -> int:
        raise error

    return work


def in_a_module_in_c(arguments: object) -> int:
    """Does what the start of a module in C makes of Ctrl-C."""
    raise ImportError("initialization failed") from KeyboardInterrupt()


@parametrize(
    "work, code, line",
    [
        (raising(UserError("x=1: give 2")), 2, "error: x=1: give 2\n"),
        (
            raising(PlatformFault("no answer")),
            1,
            "error: no answer: the same command starts from scratch\n",
        ),
        (
            raising(KeyboardInterrupt()),
            75,
            "warning: stopped at once: the same command starts from scratch\n",
        ),
        (in_a_module_in_c, 75, "warning: stopped at once: the same command starts from scratch\n"),
        (
            raising(ZeroDivisionError("x")),
            2,
            "error: tests/trainer/user_code/test_command.py:19 in work: ZeroDivisionError: x; ",
        ),
        (
            functools.partial(operator.getitem, {}),
            1,
            "error: a fault of this program or of the platform, not of your settings\nTraceback ",
        ),
    ],
)
def test_an_exception_becomes_a_line_and_a_code(
    work: Callable[..., int], code: int, line: str, capsys: Capture
) -> None:
    assert command("starts from scratch")(work)([]) == code
    found = capsys.readouterr()
    assert (found.out + found.err).startswith(line)


@parametrize("module", ["tensorflow.of_another_version", "keras.src.nothing"])
def test_a_python_without_the_right_tensorflow_is_named(module: str, capsys: Capture) -> None:
    imports: Any = functools.partial(importlib.import_module, module)
    assert command("starts from scratch")(imports)([]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"error: {sys.executable}: No module named '{module}': this environment"
    )
    assert error.count("\n") == 1


@parametrize("main", [task.main, check.main, generate.main, prepare.main])
def test_every_command_ends_so(main: object, capsys: Capture) -> None:
    assert callable(main)
    assert main(["--no-such-flag=1", "digits", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
