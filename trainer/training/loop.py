"""Runs the training loop: each call to the device runs as many steps as fit into about 3 seconds, up to the next hook.

Between calls all workers agree, by signals, a budget and the clock, whether to stop early and whether to save. A range
of steps can be profiled, for TensorBoard.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import INTERRUPTED, NotFinite
from trainer.base.log import log
from trainer.cluster.strategy import Replicas
from trainer.reporting.progress import Progress, StepLogs

_COMPILING_SECONDS, _POLL_SECONDS = 6.0, 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopRequest:
    """Records the first signal; the loop checks it between calls to the device, when weights and step agree."""

    signal: str | None = None
    reason: str = ""  # why the job ends itself, if it does
    nothing_to_save: bool = False  # no variable has changed yet: the running call compiles, perhaps for minutes

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Makes SIGINT and SIGTERM set the request within the block; a second one ends the process with exit code 75."""
    request = StopRequest()
    over = threading.Event()

    def leave_while_compiling() -> None:
        """Ends the process, some seconds after a signal, if the running call to the device has nothing to save."""
        over.wait(_COMPILING_SECONDS)
        while not over.wait(_POLL_SECONDS):
            if request.nothing_to_save:
                log.warning("the step is still being compiled: nothing is lost")
                leave_at_once()

    def receive(name: str) -> None:
        if request:
            leave_at_once()
        request.signal = name
        log.warning(f"{name}: saves after the running steps; a second signal stops at once, unsaved")
        threading.Thread(target=leave_while_compiling, name="compiling", daemon=True).start()

    with _received(receive):
        try:
            yield request
        finally:
            over.set()


def leave_on_signals() -> AbstractContextManager[None]:
    """Makes SIGINT and SIGTERM end the process with exit code 75 within the block, also while it waits in C++."""
    return _received(lambda name: leave_at_once())


@contextmanager
def _received(receive: Callable[[str], None]) -> Iterator[None]:
    """Calls `receive` with the name of each SIGINT and SIGTERM within the block, in a thread.

    Python's own handlers wait for seconds until a call to the device returns, and then see two signals as one.
    https://docs.python.org/3/library/signal.html#signal.set_wakeup_fd
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def read() -> None:
        with reader:
            while number := reader.recv(1):
                if number[0] in _SIGNALS:
                    receive(signal.Signals(number[0]).name)

    threading.Thread(target=read, name="signals", daemon=True).start()
    before = {number: signal.signal(number, lambda number, frame: None) for number in _SIGNALS}
    wakeup = signal.set_wakeup_fd(writer.fileno())
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()


def keep_handlers() -> None:
    """Installs Python's handlers of SIGINT and SIGTERM again: TensorFlow takes SIGTERM when its servers connect."""
    for number in _SIGNALS:
        signal.signal(number, signal.getsignal(number))


def leave_at_once() -> None:
    """Ends this process with exit code 75, without Python's exit: that waits for TensorFlow's threads, or crashes."""
    if sys.stdout.isatty():
        print("\033[?25h", end="")  # the progress bar hides the cursor
    log.warning("stopped at once: the same command resumes from the last checkpoint")
    sys.stderr.flush()
    os._exit(INTERRUPTED)


class Interrupted(Exception):
    """Stops the due hooks on all workers after a signal to any of them."""


class Control:
    """Decides whether to stop and whether to save, alike on all workers, by the chief's clock.

    save_every_seconds, budget_seconds: None for never, or no limit.
    """

    def __init__(
        self,
        replicas: Replicas,
        stop: StopRequest,
        save_every_seconds: float | None = None,
        budget_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas, self._request, self._clock = replicas, stop, clock
        self._save_every, self._saved_at = save_every_seconds, clock()
        self._budget_ends = None if budget_seconds is None else clock() + budget_seconds
        self.save_due = False
        self.signal: str | None = None  # the signal, or the limit, that stops the run
        self.stopped = ""  # the reason of a job that ends itself
        self.budget_spent = False

    def __bool__(self) -> bool:
        """Returns whether to stop."""
        return self.signal is not None or self.budget_spent

    def agree(self, seconds: float) -> float:
        """Synchronises all workers after a call that took `seconds`; returns the mean seconds over the workers."""
        now, chief = self._clock(), self._replicas.cluster.is_chief
        spent = chief and self._budget_ends is not None and now >= self._budget_ends
        due = chief and self._save_every is not None and now - self._saved_at >= self._save_every
        signals, limits, budget, save, total = self._replicas.sum_over_workers([*self._asked(), spent, due, seconds])
        self._record_stop(signals, limits)
        self.budget_spent, self.save_due = bool(budget), bool(save)
        if self.save_due:
            self._saved_at = now
        return float(total) / self._replicas.cluster.workers

    def agree_to_stop(self, model: Any) -> None:
        """Sets `model.stop_training` on all workers if a Keras callback has set it on any of them."""
        model.stop_training = bool(self._replicas.sum_over_workers([bool(model.stop_training)])[0])

    def watched(self) -> Replicas:
        """Returns replicas for a long measurement: their sums over workers raise Interrupted if the run is to stop."""

        def leave_if_asked() -> None:
            if self._record_stop(*self._replicas.sum_over_workers(self._asked())):
                raise Interrupted

        return replace(self._replicas, before_sum=leave_if_asked)

    def _asked(self) -> list[bool]:
        """Returns whether this worker has got a signal, and whether its job ends itself."""
        return [bool(self._request), bool(self._request.reason)]

    def _record_stop(self, signals: float, limits: float) -> bool:
        """Records and returns whether to stop, by how many workers have a signal and how many are at a limit."""
        if signals:
            self.signal = self._request.signal or "a signal to another worker"
        elif limits:
            self.signal = self.stopped = self._request.reason or "a limit, as the chief says"
        return bool(signals or limits)


CALL_SECONDS = 3.0


@dataclass(frozen=True)
class Hook:
    """Runs `act` every `every` steps (0: never), when `requested`, and, if `at_end`, when steps or budget are done.

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
        return min([multiple, total, *(cut for cut in self.cuts if cut > step)])

    def due(self, progress: Progress) -> bool:
        """Returns whether to act now."""
        on_its_step = self.every and progress.step % self.every == 0
        return bool(on_its_step or (self.at_end and progress.ends) or self.requested())


class CallSize:
    """Chooses the number of steps of the next call: from one, doubled until a call lasts `most_seconds`.

    most_steps: the largest number; 0 for no limit.
    """

    def __init__(self, most_steps: int, most_seconds: float = CALL_SECONDS) -> None:
        self._most_steps, self._most_seconds = most_steps, most_seconds
        self._allowed = 1

    def __call__(self, until_boundary: int) -> int:
        """Returns the number of steps, at most `until_boundary`."""
        return min(self._allowed, until_boundary, self._most_steps or until_boundary)

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

    run_steps: takes (first step, number of steps), runs these and returns their scalars. on_begin, on_call: called
    before and after every call to the device. hooks: run at their steps. callbacks: their batch hooks run around every
    call, with what `fit` gives them: the numbers of the call's first and last batch in the epoch, and the epoch's means
    so far, which `on_call` returns. Raises NotFinite if a loss is NaN or infinite.
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


# Records operations and kernels, but no Python calls: the loop makes few.
OPTIONS = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0, device_tracer_level=1)


@dataclass
class StepProfile:
    """Profiles `steps` (counted from 1) on each worker that has a folder for `logs`.

    Every worker must use its `cuts`, so that all of them have the same calls.
    """

    steps: range
    logs: Path | None
    progress: Progress
    _runs: bool = False

    @property
    def cuts(self) -> Hook:
        """Returns the hook that ends calls before and after the profiled steps."""
        bounds = (self.steps.start - 1, self.steps.stop - 1) if self.steps else ()
        return Hook(0, lambda progress: None, at_end=False, cuts=bounds)

    def before_call(self) -> None:
        """Starts the profile if the next call begins with its first step."""
        step, traced = self.progress.step, self.progress.first_call_ended is not None
        if not self.logs or not self.steps or self._runs:
            return
        if not traced and self.steps.start - 1 <= step < self.steps.stop - 1:
            log.warning(
                f"profile_steps: the run starts at step {step:,}, and its first call is not profiled: take later steps"
            )
        if not traced or step != self.steps.start - 1:
            return
        try:
            tf.profiler.experimental.start(str(self.logs), options=OPTIONS)
            self._runs = True
        except tf.errors.OpError as error:
            log.warning(f"profile_steps: TensorFlow's profiler cannot start: {error.message}")

    def after_call(self) -> None:
        """Ends the profile, if it runs, after its last step."""
        if self.progress.step >= self.steps.stop - 1:
            self.close()

    def close(self) -> None:
        """Ends the profile, if it runs; a run that is stopped within its steps has fewer of them."""
        if not self._runs:
            return
        self._runs = False
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:
            log.warning(f"profile_steps: TensorFlow's profiler cannot write its file: {error.message}")
