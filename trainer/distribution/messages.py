"""Sends and reads the messages between workers: one JSON object a line, of limited size and depth, from anyone.

Whoever reaches a worker's port may send anything. So a message is checked before it is used: a line has a limit, deep
or damaged JSON is no message, and text is printed only after `safe`.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

LONGEST_LINE = 256 * 1024  # bytes; the settings of a run are a few kilobytes
_DEEPEST = 8  # nested objects and lists
_LONGEST_TEXT = 2000  # characters of an error line from another worker


class Overflow(ValueError):
    """Reports a line that is longer than LONGEST_LINE."""


class LineBuffer:
    """Divides received bytes into lines, and holds the rest: at most LONGEST_LINE bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` completes. Raises Overflow if a line is too long."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) > LONGEST_LINE for line in (*lines, self._rest)):
            raise Overflow
        return lines


class Reader:
    """Reads messages one after another from a blocking connection, each within a total time.

    It consumes nothing after the last message that was read: that is for whoever takes over the connection.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link, self._buffer = link, LineBuffer()

    def read(self, timeout_seconds: float) -> dict[str, Any]:
        """Returns the next message; {} if the connection ends, the time passes, or the line is no message."""
        deadline = time.monotonic() + timeout_seconds
        lines: list[bytes] = []
        try:
            while not lines:
                left = deadline - time.monotonic()
                if left <= 0:
                    return {}
                self._link.settimeout(left)
                waiting = self._link.recv(65536, socket.MSG_PEEK)
                if not waiting:
                    return {}
                lines = self._buffer.feed(self._link.recv(waiting.find(b"\n") + 1 or len(waiting)))
        except (OSError, Overflow):
            return {}
        return parse(lines[0])


def send(link: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends a message; a lost connection is left to the reader of the response to notice."""
    with contextlib.suppress(OSError):
        link.sendall(json.dumps(message).encode() + b"\n")


def parse(line: bytes) -> dict[str, Any]:
    """Returns the JSON object of a line; {} for anything else, and for one that is nested too deeply."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and _is_shallow(found, _DEEPEST) else {}


def whole_number(message: Mapping[str, Any], name: str, most: int = 2**53) -> int | None:
    """Returns the number from 0 to `most` under `name`; None for anything else."""
    value = message.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def text(message: Mapping[str, Any], name: str) -> str:
    """Returns the text under `name` as `safe`; "" for anything else."""
    value = message.get(name)
    return safe(value) if isinstance(value, str) else ""


def safe(value: object) -> str:
    """Returns a value's text on one line, shortened, with escape codes and other control characters spelled out."""
    shown = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(value)[:_LONGEST_TEXT])
    return " ".join(shown.split())


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(one, depth - 1) for one in inner)
