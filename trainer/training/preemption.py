"""What ends a run before its last step, or saves it by the clock: signals and a budget, agreed by all workers."""

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

from trainer.distribution.strategy import Replicas
from trainer.errors import INTERRUPTED
from trainer.log import log

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Set by the first signal; the loop looks at it between calls to the device, where weights and step agree."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within the block SIGINT and SIGTERM set the request; a second one ends the process at once, with exit code 75.

    A thread hears of them: Python's own handlers wait, for seconds, until a call to the device returns, and then know
    of two signals as one. https://docs.python.org/3/library/signal.html#signal.set_wakeup_fd
    """
    request = StopRequest()
    ears, mouth = socket.socketpair()
    mouth.setblocking(False)
    threading.Thread(target=_listen, args=(ears, request), name="signals", daemon=True).start()
    before = {number: signal.signal(number, lambda number, frame: None) for number in _SIGNALS}
    wakeup = signal.set_wakeup_fd(mouth.fileno())
    try:
        yield request
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        mouth.close()


def _listen(ears: socket.socket, request: StopRequest) -> None:
    with ears:
        while number := ears.recv(1):
            if number[0] not in _SIGNALS:
                continue
            if request:
                leave_at_once()
            request.signal = signal.Signals(number[0]).name
            log.warning(f"{request.signal}: saves when the steps in hand are done; once more stops at once, unsaved")


def leave_at_once() -> None:
    """Ends this process as a kill would, at any moment without damage, but with a line and exit code 75.

    Python's own end would wait for threads that are in TensorFlow, or crash in one that still writes a checkpoint.
    """
    if sys.stdout.isatty():
        print("\033[?25h", end="")  # the progress bar hides the cursor
    log.warning("stopped at once: the same command again goes on from the last checkpoint")
    sys.stderr.flush()
    os._exit(INTERRUPTED)


class Interrupted(Exception):
    """A signal came to any of the workers, before or in the midst of what is due: raised on all of them."""


class Control:
    """Whether to stop and whether to save now, the same answer on every worker. The chief's clock counts.

    `save_every_seconds` and `budget_seconds` (of this process) are None where there is none.
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
        self._save_every, self._saved = save_every_seconds, clock()
        self._budget_ends = None if budget_seconds is None else clock() + budget_seconds
        self.save_due = False
        self.signal: str | None = None  # that stops the run
        self.budget_spent = False

    def __bool__(self) -> bool:
        """Whether to stop."""
        return self.signal is not None or self.budget_spent

    def agree(self, seconds: float) -> float:
        """Asks all workers after a call that took `seconds` here; returns the mean over the workers."""
        now, chief = self._clock(), self._replicas.cluster.is_chief
        spent = chief and self._budget_ends is not None and now >= self._budget_ends
        due = chief and self._save_every is not None and now - self._saved >= self._save_every
        signals, budget, save, total = self._replicas.sum_over_workers([bool(self._request), spent, due, seconds])
        if signals:
            self._stop_by_signal()
        self.budget_spent, self.save_due = bool(budget), bool(save)
        if self.save_due:
            self._saved = now
        return float(total) / self._replicas.cluster.workers

    def agree_to_stop(self, model: Any) -> None:
        """Keras callbacks run on every worker: where one of them sets `model.stop_training`, all workers stop."""
        model.stop_training = bool(self._replicas.sum_over_workers([bool(model.stop_training)])[0])

    def watched(self) -> Replicas:
        """The replicas for a long measurement: at each sum over the workers a signal raises Interrupted on them all."""
        return replace(self._replicas, before_sum=self._leave_if_signalled)

    def _leave_if_signalled(self) -> None:
        if self._replicas.sum_over_workers([bool(self._request)])[0]:
            self._stop_by_signal()
            raise Interrupted

    def _stop_by_signal(self) -> None:
        self.signal = self._request.signal or "a signal to another worker"
