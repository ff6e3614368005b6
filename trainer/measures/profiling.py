"""Profiles a range of steps: TensorBoard's profile in its folder of logs, and what the time of these steps goes to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tensorflow as tf

from trainer.base.log import log
from trainer.invariance.compat import Missing
from trainer.reporting.progress import Progress
from trainer.reporting.trace import PROFILES, shares_of
from trainer.training.loop import Hook

# Records operations and kernels, without Python's own calls: those of the loop are few.
OPTIONS = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0, device_tracer_level=1)


@dataclass(frozen=True)
class Cuts(Hook):
    """Does nothing but end calls to the device at `steps`."""

    steps: tuple[int, ...] = ()

    def next_after(self, step: int, total: int) -> int:
        """Returns the next of the steps, or `total`."""
        return min((cut for cut in self.steps if step < cut < total), default=total)

    def due(self, progress: Progress) -> bool:
        """Returns False."""
        return False


@dataclass
class StepProfile:
    """Records `steps` (from 1) on the worker that has a folder of `logs`; `report` gets the first one and the shares.

    Every worker must use its `cuts`, so that all of them have the same calls. compiled: as of `shares_of`.
    """

    steps: range
    logs: Path | None
    progress: Progress
    report: Callable[[Progress, int, Mapping[str, float]], None]
    compiled: bool = False
    _first: int = 0  # the first step of the profile that runs; 0: none does
    _before: set[Path] = field(default_factory=set)  # earlier profiles

    @property
    def cuts(self) -> Hook:
        """Returns the hook that ends calls before and after the profiled steps."""
        bounds = (self.steps.start - 1, self.steps.stop - 1) if self.steps else ()
        return Cuts(0, lambda progress: None, at_end=False, steps=bounds)

    def before_call(self) -> None:
        """Starts the profile if the next call begins with its first step."""
        step, traced = self.progress.step, self.progress.first_call_ended is not None
        if not self.logs or not self.steps or self._first:
            return
        if not traced and self.steps.start - 1 <= step < self.steps.stop - 1:
            log.warning(
                f"profile_steps: the run starts at step {step:,}, and its first call is not profiled: take later steps"
            )
        if not traced or step != self.steps.start - 1:
            return
        self._before = self._profiles()
        try:
            tf.profiler.experimental.start(str(self.logs), options=OPTIONS)
            self._first = step + 1
        except tf.errors.OpError as error:
            log.warning(f"profile_steps: TensorFlow's profiler cannot start: {error.message}")

    def after_call(self) -> None:
        """Ends the profile, if it runs, after its last step."""
        if self.progress.step >= self.steps.stop - 1:
            self.close()

    def close(self) -> None:
        """Ends the profile, if it runs, and reports it; a run that is stopped within its steps has fewer of them."""
        if not self._first:
            return
        first, self._first = self._first, 0
        try:
            tf.profiler.experimental.stop()
            (file,) = self._profiles() - self._before
            if self.progress.step >= first:
                self.report(self.progress, first, shares_of(file, compiled=self.compiled))
        except (tf.errors.OpError, Missing, OSError, ValueError) as error:
            log.warning(f"profile_steps: the profile cannot be read: {error}")

    def _profiles(self) -> set[Path]:
        return set(self.logs.glob(PROFILES)) if self.logs else set()
