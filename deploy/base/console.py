"""Prints lines for people: a command's on stdout and stderr, those of a Python call on the stream
that it was given.

Nothing is printed or asked otherwise, so that a program can use this package silently.
"""

import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TextIO

from trainer.base.errors import FAULT, USER_MUST_CHANGE, PlatformFault, UserError

_STREAM: ContextVar[TextIO | None] = ContextVar("stream", default=None)
# a new thread starts with neither set
_COMMAND: ContextVar[bool] = ContextVar("command", default=False)


def say(*lines: str) -> None:
    """Prints lines; a command prints them on stdout."""
    _print(sys.stdout, *lines)


def tell(line: str) -> None:
    """Prints a note beside the output proper; a command prints it on stderr."""
    _print(sys.stderr, line)


def _print(stream: TextIO, *lines: str) -> None:
    if chosen := _STREAM.get() or (stream if _COMMAND.get() else None):
        # In one write: lines of parallel runs would mix.
        print("\n".join([*lines, ""]), end="", file=chosen, flush=True)


@contextmanager
def printed_on(place: TextIO | None, *, command: bool = False) -> Iterator[None]:
    """Within the block, prints what this thread prints on the stream `place`.

    Without a stream, a `command` prints on stdout and stderr, and anything else nowhere.
    """
    tokens = _STREAM.set(place), _COMMAND.set(command)
    try:
        yield
    finally:
        _STREAM.reset(tokens[0])
        _COMMAND.reset(tokens[1])


def agrees(question: str) -> bool:
    """Asks on stderr, as stdout may be a document, and returns whether the answer is yes.

    Returns False outside a command, and where nobody answers.
    """
    if not _COMMAND.get():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    with suppress(EOFError):
        return input().strip().lower() in ("y", "yes")
    return False


def consents(question: str) -> bool:
    """Asks as `agrees` does, but only on a terminal or in a notebook, as it costs money."""
    interactive = "ipykernel" in sys.modules or (sys.stdin is not None and sys.stdin.isatty())
    return interactive and agrees(question)


def run_program(module: str, arguments: Sequence[str], show: Callable[[str], None]) -> None:
    """Runs `python -m MODULE` as a process, and passes each line that it prints to `show`.

    If interrupted, sends the process SIGTERM, at which a training saves its state, and waits for
    its end. If it fails, raises UserError or PlatformFault with the last error that it printed, and
    its exit code, or 1 if a signal ended it.
    """
    command = [sys.executable, "-u", "-m", module, *arguments]
    lines = deque[str](maxlen=50)  # the end of the output, where its error is looked for
    # In a session of its own: a terminal's Ctrl-C would reach it too, and the second signal end it
    # without saving.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
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
    text = next(
        (line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), ""
    )
    if code < 0:
        killed = (
            f"python -m {module} was killed by signal {-code} (is the memory too small for this"
            " batch?)"
        )
        text = text or killed
        code = FAULT
    # Without an error, the last line is shown beside the exit code: it may end a traceback, or tell
    # of progress.
    text = text or ": ".join([f"python -m {module} ended with exit code {code}", *[*lines][-1:]])
    error = (UserError if code == USER_MUST_CHANGE else PlatformFault)(text)
    error.exit_code = code
    raise error
