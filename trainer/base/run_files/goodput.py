"""Puts every second of a run into one class, over restarts too.

Imports no TensorFlow: `deploy` uses it.

Classes are named as in the package ml-goodput-measurement, in lower case, where they fit:
https://github.com/AI-Hypercomputer/ml-goodput-measurement
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trainer.base.run_files.job_files import Content, mapping, number

STEP = "step"
START = "training_prep"
COMPILATION = "program_startup"
INPUT = "data_loading_sync"
SAVE = "unproductive_checkpoint_save_time"
RESTORE = "unproductive_checkpoint_restore_time"
REPEATED = "wasted_progress_from_disruption"
RESTART = "infrastructure_recovery_from_disruption"
EVENTS = "custom_badput_events"
OTHER = "other"
# RESTART is that of one job, whose machines are paid for meanwhile.
CLASSES = (STEP, START, COMPILATION, INPUT, SAVE, RESTORE, EVENTS, REPEATED, RESTART, OTHER)
MUCH = 0.2  # of the time: a class other than steps with this share calls for advice


class Goodput:
    """Counts the seconds of each class over all processes; each moment is in one class.

    began: time.monotonic() when this process began; before: result.json as the last process left
        it.
    """

    def __init__(self, began: float, before: Content) -> None:
        self._seconds = seconds_by_class(before) or dict.fromkeys(CLASSES, 0.0)
        wall_seconds = number(before.get("wall_seconds")) or 0.0
        self._seconds[OTHER] += wall_seconds - sum(self._seconds.values())
        self._since = began
        self.phase = START
        self.unpaid_seconds = number(before.get("between_jobs_seconds")) or 0.0

    def enter(self, phase: str) -> None:
        """Counts the time since the last change, and makes `phase` the current class."""
        now = time.monotonic()
        self._seconds[self.phase] += now - self._since
        self._since = now
        self.phase = phase

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Counts the block, or the calls of a decorated function, to the class `phase`."""
        outer = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Moves seconds that were counted to the class `source` to the class `target`."""
        seconds = min(seconds, self._seconds[source])
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def recover(self, before: Content, *, paid: bool) -> None:
        """Counts the time from the last result.json, `before`, to the start of this process.

        paid: whether both belong to one job of Vertex AI, whose machines are paid for in between.
        """
        began = time.time() - (time.monotonic() - self._since)
        gap = max(0.0, began - (number(before.get("written_at")) or began))
        if paid:
            self._seconds[RESTART] += gap
        else:
            self.unpaid_seconds += gap

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each class up to now; together they are the run's wall time."""
        self.enter(self.phase)
        return dict(self._seconds)


def seconds_by_class(result: Content) -> dict[str, float]:
    """Returns the seconds of each class in the content of a result.json; {} if it has none."""
    seconds = mapping(result, "goodput")
    return {name: number(seconds.get(name)) or 0.0 for name in CLASSES} if seconds else {}


def share_of_steps(seconds: Mapping[str, float]) -> float | None:
    """Returns the share of steps in the seconds of all classes; None without seconds."""
    total = sum(seconds.values())
    return seconds.get(STEP, 0.0) / total if total else None
