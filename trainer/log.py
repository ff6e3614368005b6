"""Log lines: plain text at the desk, errors on stderr; JSON with a severity on stdout where Cloud Logging reads it."""

import json
import logging
import os
import sys
from collections.abc import Mapping

log = logging.getLogger("trainer")


def on_vertex(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs in a Vertex AI training container."""
    return "CLOUD_ML_JOB_ID" in environment


class _Print(logging.Handler):
    """Prints to whatever sys.stdout and sys.stderr are now, so that a progress bar can stay below the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        to_stderr = record.levelno >= logging.ERROR and not on_vertex()
        stream = sys.stderr if to_stderr else sys.stdout
        encoding = getattr(stream, "encoding", None) or "utf-8"  # in which a file's name need not be writable
        print(self.format(record).encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


class _CloudFormatter(logging.Formatter):
    """One JSON object a line: https://cloud.google.com/logging/docs/structured-logging"""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"severity": record.levelname, "message": super().format(record)})


class _DeskFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


def start_logging() -> None:
    """Sends this package's log to the console, in the form that its reader wants."""
    handler = _Print()
    handler.setFormatter(_CloudFormatter() if on_vertex() else _DeskFormatter())
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.INFO)
