"""Defines the interface of experiment trackers: two functions. docs/tracking.md has an example of
20 lines.

A sender first asks the tracker what it has already, so that each point is logged once, however
often the run restarts. Imports no tracker's package.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainer.base.errors import UserError

_FORMS = (
    "mlflow:http://HOST:PORT#EXPERIMENT, wandb:PROJECT, vertex:EXPERIMENT or"
    " package.module:function#NAME"
)
_PATTERNS = {  # of what follows the colon
    "mlflow": r"(?P<server>(?:https?|sqlite)://[^#]+)#(?P<name>.+)",
    "wandb": r"(?P<server>)(?P<name>[\w.-]+(/[\w.-]+)?)",
    "vertex": r"(?P<server>)(?P<name>[a-z0-9][a-z0-9-]{0,90})",
}


class Point(NamedTuple):
    """Holds all values that a run reports at one step; `time`: seconds since 1970."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """Holds what a tracker shows about a run beside its points; `description`: Markdown for people.

    `id`: small letters and digits, the same after each restart; `folder`: the job directory on this
        machine; `parent`: the id of the run that this one belongs to; `state`: running, finished,
        failed or killed; `files`: pictures and tables, complete once the state is not "running".
    """

    id: str
    name: str
    folder: Path
    parent: str = ""
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    state: str = "running"
    files: Sequence[Path] = ()
    description: str = ""


class Opened(NamedTuple):
    """Holds a run's page in a tracker, and a function to a metric's last step there, or -1."""

    link: str
    last_step: Callable[[str], int]


class Tracker(Protocol):
    """Represents a tracker. Its functions run in a thread of their own, beside the training.

    They raise UserError for what the user must change; any other exception counts as an outage,
    after which `begin` is called again.
    """

    def begin(self, run: TrackedRun) -> Opened:
        """Opens the run with this id, or creates it."""

    def send(self, run: TrackedRun, points: Sequence[Point]) -> None:
        """Logs points by step, and what `run` holds; any state but "running" ends the run."""


@dataclass(frozen=True)
class TrackerAddress:
    """Holds one address of `--track`: kind or dotted name, server if any, experiment."""

    text: str
    kind: str
    server: str
    name: str


def read_addresses(track: Iterable[str]) -> list[TrackerAddress]:
    """Returns the addresses in a value of `track`.

    Raises UserError, which shows no password, for any other form.
    """
    addresses = []
    for part in track:
        kind, _, rest = part.partition(":")
        if re.search(r"//[^/#]*@|[?&]", part):
            raise UserError(
                f"track={kind}:… holds a user, a password or a query, which would be stored with"
                " the run: leave them out, and set MLFLOW_TRACKING_USERNAME and"
                " MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
        function, _, label = part.partition("#")
        if kind in _PATTERNS and (match := re.fullmatch(_PATTERNS[kind], rest)):
            addresses.append(TrackerAddress(part, kind, match["server"], match["name"]))
        elif not difflib.get_close_matches(kind, _PATTERNS) and re.fullmatch(
            r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", function
        ):
            addresses.append(TrackerAddress(part, function, "", label))
        else:
            problem = (
                "no such tracker" if kind not in _PATTERNS else "not of the form of this tracker"
            )
            raise UserError(f"track={part}: {problem}: write {_FORMS}; several with commas")
    return addresses


def text_of(value: Any) -> str:
    """Returns a setting's or tag's value as trackers show it, 500 characters at most."""
    return ("" if value is None else str(value))[:500]
