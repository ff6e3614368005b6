"""Ends a job of the trainer whose GPUs are idle or that has run for too long: --stop_if_idle,
--stop_if_over."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import tensorflow as tf

from trainer.base.errors import DONE
from trainer.base.limit_watch import LimitWatch, read_limits
from trainer.base.log import log
from trainer.base.run_files.goodput import EVENTS, OTHER, SAVE, STEP
from trainer.run.start import StartedJob
from trainer.training.signals import StopRequest


class JobWatch(LimitWatch):
    """Stops this job when it reaches --stop_if_idle or its time limit.

    The chief decides for all workers. Only time in the training loop counts as idle.
    """

    def __init__(self, job: StartedJob, request: StopRequest) -> None:
        self._job = job
        self._request = request
        super().__init__(
            read_limits(),
            log.warning,
            self._stop,
            self._leave_step,
            time.time() - job.result.job_began_at,
        )

    def works(self) -> bool:
        """Returns whether training runs now, so that GPUs should be busy."""
        return self._job.result.goodput.phase in (STEP, OTHER)

    def saves(self) -> bool:
        """Returns whether the job saves, evaluates or samples now."""
        return self._job.result.goodput.phase in (SAVE, EVENTS)

    def due(self) -> str:
        """Returns why the job is to end; "" if it may go on.

        With several workers, all of them have to be idle.
        """
        if not (peers := self._job.peers):
            return super().due()
        idle = peers.share_idle(self.idle_s)
        if not self._job.cluster.is_chief:
            return peers.stop_reason
        longest = max(idle)
        shortest = min(idle)
        # A worker at the limit is named, but ends no job in which another is busy.
        if longest >= self.limits.idle_s > 2 * shortest:
            name = self._job.cluster.name(idle.index(longest))
            self._job.result.name_slow(
                name, f"its GPUs alone are idle, for {longest / 60:.3g} minutes"
            )
        return self.reached(shortest)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the limits within the block, also while the main thread hangs in a step."""
        with super().watching():
            try:
                yield
            # Another worker that leaves a hanging step makes this one fail.
            except tf.errors.OpError:
                if self.reason:
                    self._leave_step()
                raise

    def _stop(self) -> None:
        self._request.reason = self.reason
        if self._job.peers:
            self._job.peers.stop(self.reason)

    def _leave_step(self) -> None:
        """Records the stop and exits at once, as the main thread hangs in a step."""
        job = self._job
        log.warning(f"the running step hangs: stopped at the last checkpoint: {self.reason}")
        try:
            with closing(job.job_dir.mirror), job.tracking:
                job.result.write_end("stopped", self.reason)
                job.job_dir.mirror.leave()
            if job.peers:
                job.peers.abandon()
        finally:
            sys.stderr.flush()
            os._exit(DONE)
