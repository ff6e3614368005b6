"""Prints what a command does: on stdout and stderr, or, within a call of the Python API, where its caller wants it."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TextIO

_PLACE: ContextVar[TextIO | None] = ContextVar("place", default=None)  # a new thread begins without one


class _Nowhere(io.TextIOBase):
    """Forgets what is written."""

    def write(self, text: str) -> int:
        return len(text)


def say(*lines: str) -> None:
    """Prints lines, on stdout unless the caller named a place."""
    print(*lines, sep="\n", file=_PLACE.get() or sys.stdout, flush=True)


def tell(line: str) -> None:
    """Prints a line beside the output proper, on stderr unless the caller named a place."""
    print(line, file=_PLACE.get() or sys.stderr, flush=True)


@contextmanager
def printed_on(place: TextIO | None) -> Iterator[None]:
    """Prints on `place` what this thread prints within the block; nowhere if that is None."""
    token = _PLACE.set(place or _Nowhere())  # type: ignore[arg-type]
    try:
        yield
    finally:
        _PLACE.reset(token)


def agrees(question: str) -> bool:
    """Asks on stderr, as stdout may be a document; returns whether the answer is yes, False where nobody answers."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    with suppress(EOFError):
        return input().strip().lower() in ("y", "yes")
    return False


def forget_stdout() -> None:
    """Directs stdout to nowhere, as its reader has ended: else Python flushes into the closed pipe once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stdout_of_programs() -> int | None:
    """Returns the `stdout` of a program that a command starts: this one's, or nowhere within a call of the API."""
    return subprocess.DEVNULL if _PLACE.get() else None
