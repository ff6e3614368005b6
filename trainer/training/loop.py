"""Runs the loop: each call to the device takes as many steps as fit before the next hook and into about 3 seconds."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import keras

from trainer.base.errors import NotFinite
from trainer.reporting.progress import Progress, StepLogs
from trainer.training.preemption import Control, Interrupted

CALL_SECONDS = 3.0


@dataclass(frozen=True)
class Hook:
    """Runs `act` every `every` steps (0: never), on request and, with `at_end`, when steps or budget are done."""

    every: int
    act: Callable[[Progress], None]
    at_end: bool = True
    requested: Callable[[], bool] = lambda: False

    def next_after(self, step: int, total: int) -> int:
        """Returns the first step after `step` at which a call must end, at most `total`."""
        return min((step // self.every + 1) * self.every, total) if self.every else total

    def due(self, progress: Progress) -> bool:
        """Returns whether to act now."""
        on_its_step = self.every and progress.step % self.every == 0
        return bool(on_its_step or (self.at_end and progress.ends) or self.requested())


class CallSize:
    """Chooses the number of steps of the next call: doubled from one until a call lasts `most_seconds`."""

    def __init__(self, most_steps: int, most_seconds: float = CALL_SECONDS) -> None:
        self._most_steps, self._most_seconds = most_steps, most_seconds
        self._allowed = 1

    def __call__(self, until_boundary: int) -> int:
        size = min(self._allowed, until_boundary)
        return min(size, self._most_steps) if self._most_steps else size

    def learn(self, count: int, seconds: float) -> None:
        """Adapts to a timed call of `count` steps that took `seconds`."""
        fitting = int(self._most_seconds * count / max(seconds, 1e-9))
        grown = 2 * count if count >= self._allowed else self._allowed
        self._allowed = max(1, min(grown, fitting))


def train(
    run_steps: Callable[[int, int], StepLogs],
    model: keras.Model,
    progress: Progress,
    hooks: Sequence[Hook],
    callbacks: keras.callbacks.CallbackList,
    on_call: Callable[[Progress, StepLogs], Mapping[str, float]],
    call_size: CallSize,
    control: Control,
    on_begin: Callable[[], None] = lambda: None,
) -> None:
    """Trains until `progress` is finished, a Keras callback of any worker stops it, or `control` requests a stop.

    `run_steps` runs so many steps from a step on, and returns their scalars.
    `on_begin` and `on_call` are called at every call to the device, `hooks` run at their steps, and batch hooks of
    `callbacks` run around every call with what `fit` gives them: the number of its first and of its last batch in the
    epoch, and the epoch's means so far, which `on_call` returns. Raises NotFinite if a loss is NaN or infinite.
    """
    while not (progress.finished or control):
        boundary = min(hook.next_after(progress.step, progress.total_steps) for hook in hooks)
        count = call_size(boundary - progress.step)
        callbacks.on_train_batch_begin(progress.step % progress.steps_per_epoch)
        on_begin()
        began = time.monotonic()
        logs = run_steps(progress.step, count)
        seconds = control.agree(time.monotonic() - began)
        if bad := logs.first_not_finite():
            raise NotFinite.at(progress.step + bad[0] + 1, ", ".join(bad[1]))
        progress.advance(logs, seconds)
        progress.budget_spent = control.budget_spent
        if progress.call_timed:
            call_size.learn(count, seconds)
        means = on_call(progress, logs)
        callbacks.on_train_batch_end((progress.step - 1) % progress.steps_per_epoch, dict(means))
        control.agree_to_stop(model)
        run_due_hooks(hooks, progress, model)


def run_due_hooks(hooks: Sequence[Hook], progress: Progress, model: keras.Model) -> None:
    """Runs the hooks that are due, in order. A hook may raise Interrupted for a signal: the later ones do not run."""
    with suppress(Interrupted):
        for hook in hooks:
            if model.stop_training:  # an earlier hook may have set it
                progress.total_steps = progress.step
            if hook.due(progress):
                hook.act(progress)
