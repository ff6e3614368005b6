"""Prints what a command does, on stdout and stderr; what a function of the Python API does, where its caller wants it.

Without either nothing is printed and nothing asked, as in a program that imports this package.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TextIO

from trainer.base.errors import FAULT, USER_MUST_CHANGE, PlatformFault, UserError

_PLACE: ContextVar[TextIO | None] = ContextVar("place", default=None)
_COMMAND: ContextVar[bool] = ContextVar("command", default=False)  # a new thread begins with neither
_KEPT_LINES = 50  # of a program's output, among which its error is


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


def run_program(module: str, arguments: Sequence[str], show: Callable[[str], None]) -> None:
    """Runs a program of ours in a process of its own, and passes the lines that it prints to `show`.

    Interrupted, it sends the program SIGTERM, by which a training saves its state, and waits for its end. Raises the
    error that the program printed last, with its exit code, 1 if a signal ended it.
    """
    command, lines = [sys.executable, "-u", "-m", module, *arguments], deque[str](maxlen=_KEPT_LINES)
    # In a session of its own, or a terminal's Ctrl-C reaches it too, and a second signal ends it without saving.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    ) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                show(lines[-1])
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    if not (code := process.returncode):
        return
    text = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
    if code < 0:
        killed = f"python -m {module} was killed by signal {-code} (is the memory too small for this batch?)"
        text, code = text or killed, FAULT
    # A last line of any other kind is named beside the exit code: it may be of a traceback, or of progress.
    text = text or ": ".join([f"python -m {module} ended with exit code {code}", *[*lines][-1:]])
    error = (UserError if code == USER_MUST_CHANGE else PlatformFault)(text)
    error.exit_code = code
    raise error
