"""Runs the training loop: each call to the device runs as many steps as fit into about 3 seconds,
up to the next hook.

Between calls all workers agree, by signals, a budget and the clock, whether to stop early and
whether to save.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import keras
from keras.callbacks import CallbackList

from trainer.base.errors import NotFinite
from trainer.cluster.strategy import Replicas
from trainer.reporting.progress import Progress, StepLogs
from trainer.training.signals import StopRequest


class Interrupted(Exception):
    """Stops the due hooks on all workers after a signal to any of them."""


@dataclass
class Control:
    """Decides whether to stop and whether to save, alike on all workers, by the chief's clock.

    save_every_seconds, budget_seconds: infinite for never, or no limit.
    """

    replicas: Replicas
    request: StopRequest
    save_every_seconds: float = math.inf
    budget_seconds: float = math.inf
    clock: Callable[[], float] = time.monotonic
    save_due: bool = False
    signal: str | None = None  # the signal, or the limit, that stops the run
    stopped: str = ""  # the reason of a job that ends itself
    budget_spent: bool = False

    def __post_init__(self) -> None:
        self._began = self._saved_at = self.clock()

    def __bool__(self) -> bool:
        """Returns whether to stop."""
        return self.signal is not None or self.budget_spent

    def agree(self, seconds: float) -> float:
        """Synchronises all workers after a call that took `seconds`.

        Returns the mean seconds over the workers.
        """
        now = self.clock()
        chief = self.replicas.cluster.is_chief
        spent = chief and now - self._began >= self.budget_seconds
        due = chief and now - self._saved_at >= self.save_every_seconds
        signals, limits, budget, save, total = self.replicas.sum_over_workers(
            [*self._requests(), spent, due, seconds]
        )
        self._record_stop(signals, limits)
        self.budget_spent = bool(budget)
        self.save_due = bool(save)
        if self.save_due:
            self._saved_at = now
        return float(total) / self.replicas.cluster.workers

    def agree_to_stop(self, model: Any) -> None:
        """Sets `model.stop_training` on all workers if it is set on any of them."""
        model.stop_training = bool(self.replicas.sum_over_workers([bool(model.stop_training)])[0])

    def watched(self) -> Replicas:
        """Returns replicas whose sums over workers raise Interrupted if the run is to stop.

        They are for a long measurement.
        """

        def leave_if_requested() -> None:
            if self._record_stop(*self.replicas.sum_over_workers(self._requests())):
                raise Interrupted

        return replace(self.replicas, before_sum=leave_if_requested)

    def _requests(self) -> list[bool]:
        """Returns whether this worker has got a signal, and whether its job ends itself."""
        return [bool(self.request), bool(self.request.reason)]

    def _record_stop(self, signals: float, limits: float) -> bool:
        """Records and returns whether to stop, by the workers with a signal or at a limit."""
        if signals:
            self.signal = self.request.signal or "a signal to another worker"
        elif limits:
            self.signal = self.stopped = self.request.reason or "a limit, as the chief says"
        return bool(signals or limits)


CALL_SECONDS = 3.0


@dataclass(frozen=True)
class Hook:
    """Runs `act` every `every` steps (0: never) and when `requested`.

    With `at_end` it also runs when steps or budget are done.
    cuts: further steps at which calls to the device end.
    """

    every: int
    act: Callable[[Progress], None]
    at_end: bool = True
    requested: Callable[[], bool] = lambda: False
    cuts: Sequence[int] = ()

    def next_after(self, step: int, total: int) -> int:
        """Returns the first step after `step` at which a call must end, at most `total`."""
        multiple = (step // self.every + 1) * self.every if self.every else total
        return min([multiple, total, *(end for end in self.cuts if end > step)])

    def due(self, progress: Progress) -> bool:
        """Returns whether to act now."""
        on_its_step = self.every and progress.step % self.every == 0
        return bool(on_its_step or (self.at_end and progress.ends) or self.requested())


@dataclass
class CallSize:
    """Chooses the number of steps of the next call.

    It begins at one and doubles until a call lasts `most_seconds`.
    most_steps: the largest number; 0 for no limit.
    """

    most_steps: int
    most_seconds: float = CALL_SECONDS
    allowed: int = 1

    def __call__(self, until_boundary: int) -> int:
        """Returns the number of steps, at most `until_boundary`."""
        return min(self.allowed, until_boundary, self.most_steps or until_boundary)

    def learn(self, count: int, seconds: float) -> None:
        """Adapts to a timed call of `count` steps that took `seconds`."""
        fitting = int(self.most_seconds * count / max(seconds, 1e-9))
        grown = 2 * count if count >= self.allowed else self.allowed
        self.allowed = max(1, min(grown, fitting))


@dataclass
class TrainingLoop:
    """Calls the device again and again, and runs Keras callbacks and hooks in between.

    The batch hooks of `callbacks` run around every call, with what `fit` gives them: the numbers of
    the call's first and last batch in the epoch, and the epoch's means so far.
    """

    model: keras.Model
    progress: Progress
    hooks: Sequence[Hook]
    callbacks: CallbackList
    control: Control

    def train(
        self,
        call_size: CallSize,
        run_steps: Callable[[int, int], StepLogs],
        begin_call: Callable[[], None],
        end_call: Callable[[StepLogs], Mapping[str, float]],
    ) -> None:
        """Trains until `progress` is finished, or a callback or `control` ends the run.

        run_steps: takes (first step, number of steps), runs these and returns their scalars.
            begin_call, end_call: run before and after every call to the device; `end_call` returns
            the epoch's means. Raises NotFinite if a loss is NaN or infinite.
        """
        progress = self.progress
        control = self.control
        while not (progress.finished or control):
            # A call ends where the next hook is due, or earlier if it would take too long.
            total = progress.total_steps
            boundary = min(hook.next_after(progress.step, total) for hook in self.hooks)
            count = call_size(boundary - progress.step)
            self.callbacks.on_train_batch_begin(progress.step % progress.steps_per_epoch)

            # All workers agree on the time of the call, and whether it was the last one.
            begin_call()
            began = time.monotonic()
            logs = run_steps(progress.step, count)
            seconds = control.agree(time.monotonic() - began)
            if bad := logs.first_not_finite():
                raise NotFinite.at(progress.step + bad[0] + 1, ", ".join(bad[1]))
            progress.advance(logs, seconds)
            progress.budget_spent = control.budget_spent
            if progress.call_timed:
                call_size.learn(count, seconds)

            # Callbacks see the call as its last batch.
            means = end_call(logs)
            last = (progress.step - 1) % progress.steps_per_epoch
            self.callbacks.on_train_batch_end(last, dict(means))
            control.agree_to_stop(self.model)
            self.run_due_hooks()

    def run_due_hooks(self) -> None:
        """Runs the hooks that are due, in order.

        Those after one that raises Interrupted, for a signal, do not run.
        """
        with suppress(Interrupted):
            for hook in self.hooks:
                if self.model.stop_training:  # an earlier hook may have set it
                    self.progress.total_steps = self.progress.step
                if hook.due(self.progress):
                    hook.act(self.progress)
