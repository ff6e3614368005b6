"""The loop: as many steps a call as fit between two boundaries and into about 3 seconds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError
from trainer.training.progress import Progress, Window
from trainer.training.steps import StepLogs, StepRunner

CALL_SECONDS = 3.0


@dataclass(frozen=True)
class Event:
    """Something done after every `every` steps and after the last one; 0: only after the last."""

    every: int
    act: Callable[[Progress], None]

    def next_after(self, step: int, total: int) -> int:
        """The first step after `step` at which it is due."""
        return min((step // self.every + 1) * self.every, total) if self.every else total

    def due(self, progress: Progress) -> bool:
        return progress.finished or bool(self.every and progress.step % self.every == 0)


class CallSize:
    """How many steps the next call takes: doubled from one, until a call lasts as long as it may."""

    def __init__(self, most_steps: int, most_seconds: float = CALL_SECONDS):
        self._most_steps, self._most_seconds = most_steps, most_seconds
        self._allowed = 1

    def __call__(self, until_boundary: int) -> int:
        size = min(self._allowed, until_boundary)
        return min(size, self._most_steps) if self._most_steps else size

    def learn(self, count: int, seconds: float) -> None:
        """A timed call of `count` steps took `seconds`."""
        fitting = int(self._most_seconds / max(seconds / count, 1e-9))
        self._allowed = max(1, min(2 * count if count >= self._allowed else self._allowed, fitting))


def train(
    run_steps: StepRunner,
    iterator: Any,
    progress: Progress,
    events: Sequence[Event],
    call_size: CallSize,
    on_call: Callable[[Progress, StepLogs], bool],
) -> None:
    """Runs `progress` to its end. `on_call` hears of every call and says whether to stop; `events` come at their steps.

    Raises UserError when a loss is NaN or infinite, naming the step.
    """
    while not progress.finished:
        boundary = min(event.next_after(progress.step, progress.total_steps) for event in events)
        count = call_size(boundary - progress.step)
        began = time.monotonic()
        logs = run_steps(iterator, progress.step, count)
        seconds = time.monotonic() - began
        _refuse_not_finite(logs, progress.step)
        timed = progress.training_seconds > 0  # the first call traces the graph
        _advance(progress, logs, seconds, timed)
        if timed:
            call_size.learn(count, seconds)
        if on_call(progress, logs):
            progress.total_steps = progress.step
        for event in events:
            if event.due(progress):
                event.act(progress)


def _advance(progress: Progress, logs: StepLogs, seconds: float, timed: bool) -> None:
    progress.step += logs.count
    progress.training_seconds += seconds
    progress.latest = logs.means()
    if timed:
        progress.timed_steps += logs.count
        progress.timed_seconds += seconds


def _refuse_not_finite(logs: StepLogs, first_step: int) -> None:
    bad = logs.first_not_finite()
    if bad is None:
        return
    broken = [name for name, value in zip(logs.names, logs.values[bad], strict=True) if value - value != 0]
    raise UserError(
        f"step {first_step + bad + 1}: {', '.join(broken)} is NaN or infinite: lower learning_rate, or try "
        "--precision=float32; what was written so far is kept"
    )
