"""Profiles a range of steps: TensorBoard's profile in its folder of logs."""

from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from trainer.base.log import log
from trainer.reporting.progress import Progress
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
    """Records `steps` (from 1) on the worker that has a folder of `logs`.

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
        return Cuts(0, lambda progress: None, at_end=False, steps=bounds)

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
