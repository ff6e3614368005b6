"""Tests how commands end: exit codes and one line."""

import functools
import importlib
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.fixtures import Capture, Patch, parametrize
from trainer import check, generate, task
from trainer.base.errors import PlatformFault, UserError
from trainer.base.log import ANSWER, log, start_logging
from trainer.data import prepare
from trainer.user_code.command import command, quiet_start


def raising(error: BaseException) -> Callable[..., int]:
    def work(arguments: object) -> int:
        raise error

    return work


LINE = raising.__code__.co_firstlineno + 2  # which raises


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
            f"error: tests/trainer/user_code/test_command.py:{LINE} in work: ZeroDivisionError: x;",
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


def test_the_answer_of_a_command_stands_alone_on_stdout(capsys: Capture) -> None:
    def work(arguments: object) -> int:
        log.info("loads the model")
        log.info("loss 0.5", extra=ANSWER)
        log.warning("low")
        return 0

    assert command("starts from scratch", answers=True)(work)([]) == 0
    assert capsys.readouterr() == ("loss 0.5\n", "loads the model\nwarning: low\n")
    assert command("starts from scratch")(work)([]) == 0
    assert capsys.readouterr() == ("loads the model\nloss 0.5\n", "warning: low\n")


def test_a_reader_that_ends_ends_no_training() -> None:
    text = "\n".join(
        [
            "from trainer.base.log import log, start_logging",
            "start_logging()",
            "for number in range(3):",
            "    log.info('x' * 100_000)",
            "log.error('the end')",
        ]
    )
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-c", text], stdout=writer, stderr=subprocess.PIPE, text=True, check=True
    )
    os.close(writer)
    assert ended.stderr == "error: the end\n"


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


def test_a_command_says_once_that_it_loads_tensorflow(capsys: Capture, monkeypatch: Patch) -> None:
    start_logging()
    with quiet_start():  # loaded in this process already
        assert capsys.readouterr().out == ""
    monkeypatch.delitem(sys.modules, "tensorflow")
    with quiet_start():
        assert capsys.readouterr().out == "loads TensorFlow …\n"
