"""Profiles some steps of a run for TensorBoard (`--profile_steps`)."""

from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from trainer.base.log import log
from trainer.reporting.progress import Progress
from trainer.training.loop import Hook

# Records operations and kernels, but no Python calls: the loop makes few.
OPTIONS = tf.profiler.experimental.ProfilerOptions(
    host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
)


@dataclass
class StepProfile:
    """Profiles `steps` (the first of a run is 1) on each worker that has a folder for `logs`.

    Every worker must use its `cuts`, so that all of them have the same calls.
    """

    steps: range
    logs: Path | None
    progress: Progress
    _runs: bool = False

    @property
    def cuts(self) -> Hook:
        """Returns the hook that ends calls before and after the profiled steps."""
        ends = (self.steps.start - 1, self.steps.stop - 1)
        return Hook(0, lambda progress: None, at_end=False, cuts=ends)

    def before_call(self) -> None:
        """Starts the profile if the next call begins with its first step."""
        step = self.progress.step
        if not self.logs or self._runs or step + 1 not in self.steps:
            return
        if self.progress.first_call_ended is None:
            log.warning(
                f"profile_steps: the run starts at step {step:,}, and its first call is not"
                " profiled: take later steps"
            )
        elif step + 1 == self.steps.start:
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
        """Ends the profile, if it runs.

        A run that is stopped within its steps has fewer of them.
        """
        if not self._runs:
            return
        self._runs = False
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:
            log.warning(
                f"profile_steps: TensorFlow's profiler cannot write its file: {error.message}"
            )
