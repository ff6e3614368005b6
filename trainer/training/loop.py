"""The loop: as many steps a call as fit between two boundaries and into about 3 seconds."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import keras

from trainer.errors import NotFinite
from trainer.reporting.progress import Progress, StepLogs
from trainer.training.preemption import Control, Interrupted
from trainer.training.steps import StepRunner

CALL_SECONDS = 3.0


@dataclass(frozen=True)
class Hook:
    """Done after every `every` steps (0: never), when `asked` for, and, with `at_end`, after the last step.

    The last step is also the one after which a budget is spent.
    """

    every: int
    act: Callable[[Progress], None]
    at_end: bool = True
    asked: Callable[[], bool] = lambda: False

    def next_after(self, step: int, total: int) -> int:
        """The first step after `step` where it cuts a call, at most `total`."""
        return min((step // self.every + 1) * self.every, total) if self.every else total

    def due(self, progress: Progress) -> bool:
        """Whether to act now."""
        on_its_step = self.every and progress.step % self.every == 0
        return bool(on_its_step or (self.at_end and progress.ends) or self.asked())


class CallSize:
    """How many steps the next call takes: doubled from one, until a call lasts as long as it may."""

    def __init__(self, most_steps: int, most_seconds: float = CALL_SECONDS) -> None:
        self._most_steps, self._most_seconds = most_steps, most_seconds
        self._allowed = 1

    def __call__(self, until_boundary: int) -> int:
        size = min(self._allowed, until_boundary)
        return min(size, self._most_steps) if self._most_steps else size

    def learn(self, count: int, seconds: float) -> None:
        """A timed call of `count` steps took `seconds`."""
        fitting = int(self._most_seconds * count / max(seconds, 1e-9))
        grown = 2 * count if count >= self._allowed else self._allowed
        self._allowed = max(1, min(grown, fitting))


def train(
    run_steps: StepRunner,
    iterator: Any,
    progress: Progress,
    events: Sequence[Hook],
    callbacks: keras.callbacks.CallbackList,
    on_call: Callable[[Progress, StepLogs], None],
    call_size: CallSize,
    control: Control,
    on_begin: Callable[[], None] = lambda: None,
) -> None:
    """Runs until `progress` is finished, a Keras callback of any worker stops it, or `control` says stop.

    `on_begin` and `on_call` hear of every call to the device, `events` come at their steps, batch hooks of `callbacks`
    once a call with the step reached. UserError, naming the step, when a scalar is NaN or infinite.
    """
    while not (progress.finished or control):
        boundary = min(event.next_after(progress.step, progress.total_steps) for event in events)
        count = call_size(boundary - progress.step)
        callbacks.on_train_batch_begin(progress.step)
        on_begin()
        began = time.monotonic()
        logs = run_steps(iterator, progress.step, count)
        seconds = control.agree(time.monotonic() - began)
        _refuse_not_finite(logs, progress.step)
        progress.advance(logs, seconds)
        progress.budget_spent = control.budget_spent
        if progress.call_timed:
            call_size.learn(count, seconds)
        on_call(progress, logs)
        callbacks.on_train_batch_end(progress.step, logs.means())
        control.agree_to_stop(run_steps.model)
        do_due(events, progress, run_steps.model)


def do_due(events: Sequence[Hook], progress: Progress, model: keras.Model) -> None:
    """Does what is due now, in its order. An event may raise Interrupted, for a signal: those after it are left."""
    with suppress(Interrupted):
        for event in events:
            if model.stop_training:  # also by an event before this one
                progress.total_steps = progress.step
            if event.due(progress):
                event.act(progress)


def _refuse_not_finite(logs: StepLogs, first_step: int) -> None:
    bad = logs.first_not_finite()
    if bad is not None:
        index, names = bad
        raise NotFinite(
            f"step {first_step + index + 1}: {', '.join(names)} is NaN or infinite: lower learning_rate or try "
            "--precision=float32, with another --job_dir; what was written before is kept"
        )
