"""Prints what a command does, on stdout and stderr; what a function of the Python API does, where its caller wants it.

Without either nothing is printed and nothing asked, as in a program that imports this package.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TextIO

from trainer.base.errors import FAULT, USER_MUST_CHANGE, PlatformFault, UserError

_PLACE: ContextVar[TextIO | None] = ContextVar("place", default=None)
_COMMAND: ContextVar[bool] = ContextVar("command", default=False)  # a new thread begins with neither


def say(*lines: str) -> None:
    """Prints lines, those of a command on stdout."""
    _print(sys.stdout, *lines)


def tell(line: str) -> None:
    """Prints a line beside the output proper, that of a command on stderr."""
    _print(sys.stderr, line)


def _print(stream: TextIO, *lines: str) -> None:
    if place := _PLACE.get() or (stream if _COMMAND.get() else None):
        print(*lines, sep="\n", file=place, flush=True)


@contextmanager
def printed_on(place: TextIO | None, *, command: bool = False) -> Iterator[None]:
    """Directs what this thread prints within the block to `place`.

    Without one a `command` prints on stdout and stderr, a function nowhere.
    """
    tokens = _PLACE.set(place), _COMMAND.set(command)
    try:
        yield
    finally:
        _PLACE.reset(tokens[0])
        _COMMAND.reset(tokens[1])


def agrees(question: str) -> bool:
    """Asks on stderr, as stdout may be a document; returns whether the answer is yes, False where nobody answers."""
    if not _COMMAND.get():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    with suppress(EOFError):
        return input().strip().lower() in ("y", "yes")
    return False


def forget_stdout() -> None:
    """Directs stdout to nowhere, as its reader has ended: else Python flushes into the closed pipe once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def error_of_program(lines: Sequence[str], code: int, program: str) -> UserError | PlatformFault:
    """Returns the error that a program of ours printed last among `lines`, with its exit code; 1 if a signal ended it.

    A line of any other kind is named beside the exit code: it may be of a traceback, or of progress.
    """
    text = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
    if code < 0:
        text, code = text or f"{program} was killed by signal {-code} (is the memory too small?)", FAULT
    text = text or ": ".join([f"{program} ended with exit code {code}", *lines[-1:]])
    error = (UserError if code == USER_MUST_CHANGE else PlatformFault)(text)
    error.exit_code = code
    return error
