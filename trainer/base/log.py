"""Formats log lines, durations, and progress bars at a terminal.

Lines are plain text locally, with warnings and errors on stderr, and JSON with a severity on stdout
for Cloud Logging.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TextIO

log = logging.getLogger("trainer")
ANSWER = {"answer": True}  # `extra` of a line that is the answer of a command


def on_vertex() -> bool:
    """Returns whether this process runs in a Vertex AI training container."""
    return "CLOUD_ML_JOB_ID" in os.environ


class _Console(logging.Handler):
    """Prints to the current sys.stdout and sys.stderr, so that a progress bar stays below.

    Lines are plain text, or JSON on Vertex AI:
    https://cloud.google.com/logging/docs/structured-logging
    answers: whether stdout is for the answer of a command alone, the lines with `ANSWER`.
    """

    def __init__(self, answers: bool) -> None:
        super().__init__()
        self._answers = answers

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        stream = sys.stdout
        if on_vertex():
            text = json.dumps({"severity": record.levelname, "message": text})
        else:
            is_warning = record.levelno >= logging.WARNING
            if is_warning:
                text = f"{record.levelname.lower()}: {text}"
            if is_warning or (self._answers and not hasattr(record, "answer")):
                stream = sys.stderr
        # an encoding may lack characters of a file name
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:  # nobody reads on, as after `| head`: training goes on
            forget(stream)


def forget(stream: TextIO) -> None:
    """Stops writing to a stream whose reader has ended, or Python would fail on it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def set_verbose(verbose: bool) -> None:
    """Shows or hides debug lines, such as the traceback of an error in one line."""
    log.setLevel(logging.DEBUG if verbose else logging.INFO)


def start_logging(*, answers: bool = False) -> None:
    """Sends this package's log to the console, as JSON on Vertex AI and as plain text elsewhere."""
    log.handlers[:] = [_Console(answers)]
    log.propagate = False
    log.setLevel(logging.INFO)


@contextmanager
def hidden(hides: bool) -> Iterator[None]:
    """Hides lines of progress in the block, if `hides`, and shows only warnings."""
    level = log.level
    if hides:
        log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


@cache
def warn_once(line: str) -> None:
    """Logs a warning, but not the same one twice in a process."""
    log.warning("%s", line)


def duration(seconds: float, hours_always: bool = False) -> str:
    """Returns H:MM:SS, or M:SS below an hour unless `hours_always`, rounded to whole seconds."""
    minutes, remainder = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours or hours_always:
        return f"{hours}:{minutes:02d}:{remainder:02d}"
    return f"{minutes}:{remainder:02d}"


class ProgressBar:
    """Shows a progress bar on stderr, but only where that is a terminal and not on Vertex AI.

    columns: some of "bar", "count", "bytes", "speed", "left" (remaining time) and "text" (the
        description), in order.
    """

    def __init__(
        self,
        *columns: str,
        total: float | None = None,
        completed: int = 0,
        text: str = "",
        hidden: bool = False,
    ) -> None:
        self.shown = sys.stderr.isatty() and not (hidden or on_vertex())
        if self.shown:
            from rich import progress as rich
            from rich.console import Console

            columns_by_name = {
                "bar": rich.BarColumn(20),
                "count": rich.MofNCompleteColumn(),
                "bytes": rich.DownloadColumn(),
                "speed": rich.TransferSpeedColumn(),
                "left": rich.TimeRemainingColumn(),
                "text": rich.TextColumn("{task.description}", markup=False),
            }
            self._bar = rich.Progress(
                *(columns_by_name[name] for name in columns),
                console=Console(stderr=True),
                # else lines for a file would go to the terminal, too
                redirect_stdout=sys.stdout.isatty(),
            )
            self._task = self._bar.add_task(text, total=total, completed=completed)
            self._bar.start()

    def update(self, **changes: Any) -> None:
        """Changes the bar as rich.progress.Progress.update does."""
        if self.shown:
            self._bar.update(self._task, **changes)

    def close(self) -> None:
        """Stops updating and leaves the bar on the screen."""
        if self.shown:
            self._bar.stop()
