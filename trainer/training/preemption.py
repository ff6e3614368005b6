"""Decides when a run stops early or saves by the clock: by signals and a budget, with agreement of all workers."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from trainer.base.errors import INTERRUPTED
from trainer.base.log import log
from trainer.cluster.strategy import Replicas

_COMPILING_SECONDS, _POLL_SECONDS = 6.0, 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Records the first signal; the loop checks it between calls to the device, when weights and step agree."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self.reason = ""  # for which the job ends itself
        self.nothing_to_save = False  # the running call to the device does not count, and may take minutes

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Makes SIGINT and SIGTERM set the request within the block; a second one ends the process with exit code 75."""
    request, over = StopRequest(), threading.Event()

    def receive(name: str) -> None:
        if request:
            leave_at_once()
        request.signal = name
        log.warning(f"{name}: saves after the running steps; a second signal stops at once, unsaved")
        threading.Thread(target=_leave_while_compiling, args=(over, request), name="compiling", daemon=True).start()

    with _received(receive):
        try:
            yield request
        finally:
            over.set()


def _leave_while_compiling(over: threading.Event, request: StopRequest) -> None:
    """Ends the process, some seconds after a signal, when the running call to the device does not count."""
    over.wait(_COMPILING_SECONDS)
    while not over.wait(_POLL_SECONDS):
        if request.nothing_to_save:
            log.warning("the step is still being compiled: nothing is lost")
            leave_at_once()


@contextmanager
def leave_on_signals() -> Iterator[None]:
    """Makes SIGINT and SIGTERM end the process with exit code 75 within the block, also while it waits in C++."""
    with _received(lambda name: leave_at_once()):
        yield


@contextmanager
def _received(receive: Callable[[str], None]) -> Iterator[None]:
    """Calls `receive` with the name of each SIGINT and SIGTERM within the block, in a thread.

    Python's own handlers wait for seconds until a call to the device returns, and then see two signals as one.
    https://docs.python.org/3/library/signal.html#signal.set_wakeup_fd
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    threading.Thread(target=_read, args=(reader, receive), name="signals", daemon=True).start()
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
    """Sets Python's handlers of SIGINT and SIGTERM again: that of SIGTERM is TensorFlow's once its servers connect."""
    for number in _SIGNALS:
        signal.signal(number, signal.getsignal(number))


def _read(reader: socket.socket, receive: Callable[[str], None]) -> None:
    with reader:
        while number := reader.recv(1):
            if number[0] in _SIGNALS:
                receive(signal.Signals(number[0]).name)


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
    """Decides whether to stop and whether to save, equally on every worker, by the chief's clock. None: no limit."""

    def __init__(
        self,
        replicas: Replicas,
        stop: StopRequest,
        save_every_seconds: float | None = None,
        budget_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas, self._request, self._clock = replicas, stop, clock
        self._save_every, self._saved = save_every_seconds, clock()
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
        due = chief and self._save_every is not None and now - self._saved >= self._save_every
        signals, limits, budget, save, total = self._replicas.sum_over_workers([*self._asked(), spent, due, seconds])
        self._stops(signals, limits)
        self.budget_spent, self.save_due = bool(budget), bool(save)
        if self.save_due:
            self._saved = now
        return float(total) / self._replicas.cluster.workers

    def agree_to_stop(self, model: Any) -> None:
        """Sets `model.stop_training` on all workers if a Keras callback has set it on any of them."""
        model.stop_training = bool(self._replicas.sum_over_workers([bool(model.stop_training)])[0])

    def watched(self) -> Replicas:
        """Returns replicas for a long measurement: a sum over the workers raises Interrupted if the run is to stop."""
        return replace(self._replicas, before_sum=self._leave_if_asked)

    def _leave_if_asked(self) -> None:
        if self._stops(*self._replicas.sum_over_workers(self._asked())):
            raise Interrupted

    def _asked(self) -> list[bool]:
        return [bool(self._request), bool(self._request.reason)]

    def _stops(self, signals: float, limits: float) -> bool:
        """Records what stops the run, by the numbers of workers with a signal and at a limit."""
        if signals:
            self.signal = self._request.signal or "a signal to another worker"
        elif limits:
            self.signal = self.stopped = self._request.reason or "a limit, as the chief says"
        return bool(signals or limits)
