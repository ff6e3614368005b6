"""Ends a paid job by itself whose GPUs are idle, or that takes longer than its plan: --stop_if_idle, --stop_if_over."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from trainer.base.log import log
from trainer.base.run_files.goodput import EVENTS, OTHER, SAVE, STEP, Goodput
from trainer.base.run_files.stop_limits import IDLE_PERCENT, StopLimits
from trainer.cluster.peers import Peers
from trainer.reporting.resources import Gpus
from trainer.training.preemption import StopRequest

POLL_SECONDS = 5.0
GRACE_SECONDS = (
    30.0  # for the loop to end, without saving and evaluation; one that hangs is left with its last checkpoint
)


class LimitWatch:
    """Looks every POLL_SECONDS how long this worker's GPUs have been idle in the loop; the chief decides for all.

    Only time in the loop counts: not the start, saving, evaluation and compilation. `job_seconds`: returns for how long
    the job has run; `leave`: ends this process, which hangs, with its reason; `slow`: is told of a worker that is idle
    alone, by its index.
    """

    def __init__(
        self, limits: StopLimits, gpus: Gpus, goodput: Goodput, peers: Peers | None, request: StopRequest,
        job_seconds: Callable[[], float], leave: Callable[[str], None], slow: Callable[[int, float], None],
    ) -> None:  # fmt: skip
        self._limits, self._gpus, self._goodput, self._peers, self._request = limits, gpus, goodput, peers, request
        self._job_seconds, self._leave, self._slow = job_seconds, leave, slow
        self._idle, self._at, self._stopped_at, self._told = 0.0, time.monotonic(), 0.0, set[str]()

    def look(self) -> None:
        """Counts the time since the last look, warns at half of a limit, and ends the job at a limit."""
        now, limits = time.monotonic(), self._limits
        elapsed, self._at = now - self._at, now
        if self._request.reason:
            self._stopped_at = now if self._goodput.phase in (SAVE, EVENTS) else self._stopped_at
            if now - self._stopped_at > GRACE_SECONDS:
                self._leave(self._request.reason)
            return
        if self._goodput.phase in (STEP, OTHER):
            used = [gpu["utilization_percent"] for gpu in self._gpus.read()]
            idle = used and all(percent is not None and percent < IDLE_PERCENT for percent in used)
            self._idle = self._idle + elapsed if idle else 0.0
        reason = self._peers.stop_reason if self._peers else ""
        idle_seconds = self._peers.share_idle(self._idle) if self._peers else [self._idle]
        if not self._peers or self._peers.is_chief:
            times = [(min(idle_seconds), limits.idle_s, limits.idle), (self._job_seconds(), limits.over_s, limits.over)]
            for seconds, limit, text in times:
                self._warn(
                    limit and seconds >= limit / 2, f"half of the time is over until this job ends itself: {text}"
                )
            reason = next((text for seconds, limit, text in times if limit and seconds >= limit), "")
            if max(idle_seconds) >= limits.idle_s > 2 * min(idle_seconds):
                self._slow(idle_seconds.index(max(idle_seconds)), max(idle_seconds))
        if reason:
            log.warning(f"stops: {reason}")
            self._request.reason, self._stopped_at = reason, now
            if self._peers:
                self._peers.stop(reason)

    def leave_if_stopped(self) -> None:
        """Ends this process if the job is ending itself."""
        if self._request.reason:
            self._leave(self._request.reason)

    def _warn(self, due: object, line: str) -> None:
        if due and line not in self._told:
            self._told.add(line)
            log.warning(line)


@contextmanager
def guarding(guard: LimitWatch | None) -> Iterator[None]:
    """Lets a thread look within the block. An error of TensorFlow ends a job that is ending itself as planned."""
    over = threading.Event()

    def watch(guard: LimitWatch) -> None:
        while not over.wait(POLL_SECONDS):
            guard.look()

    if guard:
        threading.Thread(target=watch, args=(guard,), name="guard", daemon=True).start()
    try:
        yield
    except tf.errors.OpError:  # another worker has left its hanging step
        if guard:
            guard.leave_if_stopped()
        raise
    finally:
        over.set()
