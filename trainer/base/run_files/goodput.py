"""Puts every second of a run into one class, over restarts too. Imports no TensorFlow: `deploy` uses it.

Classes are named as in the package ml-goodput-measurement, in lower case, where they fit:
https://github.com/AI-Hypercomputer/ml-goodput-measurement
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.base.run_files.records import mapping, number

STEP, START, COMPILATION, INPUT = "step", "training_prep", "program_startup", "data_loading_sync"
SAVE, RESTORE = "unproductive_checkpoint_save_time", "unproductive_checkpoint_restore_time"
REPEATED, RESTART = "wasted_progress_from_disruption", "infrastructure_recovery_from_disruption"
EVENTS, OTHER = "custom_badput_events", "other"
CLASSES = {
    STEP: "steps",
    START: "start",
    COMPILATION: "compilation",
    INPUT: "input",
    SAVE: "saving",
    RESTORE: "restoring",
    EVENTS: "evaluation and samples",
    REPEATED: "repeated steps",
    RESTART: "restarts",  # of one job, whose machines are paid for meanwhile
    OTHER: "other",
}
MUCH = 0.2  # of the time: so large a share of a class that is no step calls for advice
_JOB = "CLOUD_ML_JOB_ID"  # Vertex AI sets it
_ALIVE, _ALIVE_SECONDS = ".alive", 1.0  # a file whose time says when a killed process was last there


class Goodput:
    """Counts the seconds of each class over this process and the earlier ones; each moment is in one class.

    began: time.monotonic() when this process began; before: result.json as the last process left it.
    """

    def __init__(self, began: float, before: Mapping[str, Any]) -> None:
        self._seconds = classes_of(before) or dict.fromkeys(CLASSES, 0.0)
        self._seconds[OTHER] += (number(before.get("wall_seconds")) or 0.0) - sum(self._seconds.values())
        self._since, self.phase = began, START
        self.unpaid_seconds = number(before.get("between_jobs_seconds")) or 0.0

    def enter(self, phase: str) -> None:
        """Ends the class in which this process is, and begins another."""
        now = time.monotonic()
        self._seconds[self.phase] += now - self._since
        self._since, self.phase = now, phase

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Counts the block, or the calls of a function that this decorates, to a class."""
        around = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(around)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Moves seconds that were counted to the class `source` to the class `target`."""
        seconds = min(seconds, self._seconds[source])
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def recover(self, before: Mapping[str, Any], folder: Path, *, paid: bool) -> None:
        """Counts the time after a killed process last wrote `before`, and the time until this process began.

        paid: whether both belong to one job of Vertex AI, whose machines are paid for in between.
        """
        written, now = number(before.get("written_at")), time.time() - (time.monotonic() - self._since)
        alive, killed = folder / _ALIVE, before.get("state") == "running"
        if written is None:  # killed before its first result.json, if at all
            with suppress(OSError, ValueError):
                began, job = alive.read_text(encoding="utf-8").split()
                written, killed, paid = float(began), True, job == os.environ.get(_JOB)
        if written is None:
            return
        last = max(written, min(alive.stat().st_mtime, now) if alive.is_file() else written)
        self._seconds[REPEATED if killed else OTHER] += last - written
        if paid:
            self._seconds[RESTART] += max(0.0, now - last)
        else:
            self.unpaid_seconds += max(0.0, now - last)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each class up to now; together they are the run's wall time."""
        self.enter(self.phase)
        return dict(self._seconds)


@contextmanager
def kept_alive(folder: Path, began: float) -> Iterator[None]:
    """Touches a file of the local job directory within the block, for `recover` after a kill; removes it at the end.

    began: time.monotonic() when this process began; the file holds the time of the first one that was killed.
    """
    over = threading.Event()
    with suppress(OSError), (folder / _ALIVE).open("x", encoding="utf-8") as file:
        file.write(f"{time.time() - (time.monotonic() - began):.3f} {os.environ.get(_JOB) or 'none'}")

    def touch() -> None:
        while not over.wait(_ALIVE_SECONDS):
            with suppress(OSError):
                (folder / _ALIVE).touch()

    thread = threading.Thread(target=touch, name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with suppress(OSError):
            (folder / _ALIVE).unlink(missing_ok=True)


def classes_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the seconds of each class in the content of a result.json; {} if it has none."""
    seconds = mapping(result, "goodput")
    return {name: number(seconds.get(name)) or 0.0 for name in CLASSES} if seconds else {}


def share_of_steps(*runs: Mapping[str, float]) -> float | None:
    """Returns the share of the seconds of all classes of some runs in which steps ran; None without seconds."""
    total = sum(sum(seconds.values()) for seconds in runs)
    return sum(seconds.get(STEP, 0.0) for seconds in runs) / total if total else None


def shares_in_words(seconds: Mapping[str, float], least: float = 0.005) -> str:
    """Returns `steps 84 %, start 7 %`: the shares of the sum, the largest first, without those below `least`."""
    total = sum(seconds.values())
    shares = sorted(((value / total, CLASSES[name]) for name, value in seconds.items() if total), reverse=True)
    return ", ".join(
        f"{words} {100 * share:.{1 if share < 0.02 else 0}f} %" for share, words in shares if share >= least
    )
