"""Formats log lines: plain text with errors on stderr locally, JSON with a severity on stdout for Cloud Logging."""

import functools
import json
import logging
import os
import sys
from collections.abc import Mapping

log = logging.getLogger("trainer")


def on_vertex(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this process runs in a Vertex AI training container."""
    return "CLOUD_ML_JOB_ID" in environment


class _Print(logging.Handler):
    """Prints to the current sys.stdout and sys.stderr, so that a progress bar can stay below the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        to_stderr = record.levelno >= logging.ERROR and not on_vertex()
        stream = sys.stderr if to_stderr else sys.stdout
        encoding = getattr(stream, "encoding", None) or "utf-8"  # it may lack characters of a file name
        print(self.format(record).encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


class _Formatter(logging.Formatter):
    """Formats a record as plain text, or as JSON: https://cloud.google.com/logging/docs/structured-logging"""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if on_vertex():
            return json.dumps({"severity": record.levelname, "message": text})
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


def set_verbose(verbose: bool) -> None:
    """Logs the tracebacks of errors that are reported in one line, too."""
    log.setLevel(logging.DEBUG if verbose else logging.INFO)


def start_logging() -> None:
    """Sends this package's log to the console, as JSON on Vertex AI and as plain text elsewhere."""
    handler = _Print()
    handler.setFormatter(_Formatter())
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.INFO)


@functools.cache
def warn_once(line: str) -> None:
    """Logs a warning the first time that it is given in this process."""
    log.warning("%s", line)
