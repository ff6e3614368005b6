"""Runs the steps of a run by the program that suits them: plain, or compiled by XLA, of one step or
of several.

How many steps one program runs follows, like the choice of XLA, from what is known of the step,
never from a clock.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from trainer.base.log import log
from trainer.base.settings.xla_rule import FLOPS_OF_BYTE, FLOPS_OF_START, MOST_FLOPS
from trainer.data.fit_data import FitBatches
from trainer.reporting.error_lines import is_out_of_memory
from trainer.reporting.progress import Progress, StepLogs
from trainer.run.start import StartedJob
from trainer.run.training_setup import TrainingSetup
from trainer.training.signals import StopRequest
from trainer.training.step_operations import NO_KERNEL, ONE_STEP, operations
from trainer.training.steps import StepRunner
from trainer.training.xla_choice import XlaChoice, choose, failure_of, not_compiled

MOST_STEPS = 50  # of a program, so that a call which ends within it draws little in vain
MOST_BYTES = {"CPU": 32 * 2**20, "GPU": 256 * 2**20}  # of the rows of a program


@dataclass
class StepProgram:
    """Holds the program of a run's steps and the rows that it reads.

    It runs plain steps until `choose` is called. If XLA fails to compile the first call, the steps
    run plain from there on. The step of a smaller last batch always runs plain.
    """

    job: StartedJob
    setup: TrainingSetup
    progress: Progress
    stop: StopRequest

    def __post_init__(self) -> None:
        self._run_plain_from(self.progress.step)
        if self.progress.finished and isinstance(self.setup.dataset.train, FitBatches):
            # Drawing a batch lets a shuffle go on after these passes in a script's next `fit`.
            next(self._rows)

    def _run_plain_from(self, step: int) -> None:
        """Makes this the program of plain steps, whose rows begin at `step`."""
        self.runner = self.setup.step_runner()
        self._rows = self.setup.rows_from(step)
        if self.setup.schedule.last:
            self._last_runner = self.setup.last_step_runner()
            self._last_rows = self.setup.last_rows_from(step)

    def choose(self, most_steps: int) -> None:
        """Chooses whether XLA compiles the steps, and how many of them a program runs.

        most_steps: the largest number.
        """
        setup = self.setup
        step = self.progress.step
        compiled = setup.step_runner(compiled=True)
        remaining = self.progress.total_steps - step
        size = partial(compiled.size, self._rows)
        most = 1 if setup.schedule.last else most_steps

        def gains() -> bool:
            return most > 1 and gains_by_loop(self.runner, self._rows)

        before = self.job.xla_choice
        choice = choose(setup.config, setup.model, setup.replicas, remaining, size, gains, before)
        if choice.compiled:
            count = steps_per_program(compiled, self._rows, most)
            if count > 1:
                log.info(f"jit_compile: a program of XLA runs up to {count} steps")
                compiled = setup.step_runner(compiled=True, steps_per_program=count)
                self._rows = setup.rows_from(step, count)
            self.runner = compiled
        self._keep(choice)

    def __call__(self, first_step: int, count: int) -> StepLogs:
        """Runs `count` steps from `first_step` on and returns their scalars."""
        logs = None
        while count:
            size = min(count, self.setup.schedule.whole_from(first_step))
            if size:
                more = self._run_whole(first_step, size)
            else:
                size = 1
                rows = self._rows if self._last_rows is None else self._last_rows
                more = self._last_runner(rows, first_step, 1)
            logs = logs.joined(more) if logs else more
            first_step += size
            count -= size
        assert logs
        return logs

    def _run_whole(self, first_step: int, count: int) -> StepLogs:
        """Runs `count` steps of whole batches."""
        # The first call is of one step, and XLA compiles it before anything runs. So if that fails,
        # or a signal arrives during it, no variable has changed.
        compiles = self.runner.compiled and not self.progress.first_call_ended
        self.stop.nothing_to_save = compiles
        try:
            return self.runner(self._rows, first_step, count)
        except Exception as error:
            if not compiles or is_out_of_memory(error):
                raise
            choice = not_compiled(failure_of(error))
        finally:
            self.stop.nothing_to_save = False
        self._run_plain_from(first_step)
        self._keep(choice)
        return self.runner(self._rows, first_step, count)

    def _keep(self, choice: XlaChoice) -> None:
        """Keeps the choice, in run.json, for a restart."""
        self.job.xla_choice = choice
        if self.job.cluster.is_chief:
            steps = {"steps_per_program": self.runner.steps_per_program}
            self.job.job_dir.add_to_run_info(compilation={**asdict(choice), **steps})


def gains_by_loop(runner: StepRunner, rows: Any) -> bool:
    """Returns whether many steps in one program of XLA are faster than single kernels.

    The step is traced now for `rows` if it has not been. A CPU's convolutions are some ten times
    slower in a loop of XLA (https://github.com/jax-ml/jax/issues/12868).
    """
    try:
        work = list(operations(runner.traced(rows).graph, ONE_STEP, runner.replicas.rows))
    # Tracing fails, as the first call will report, or loops are nested too deeply.
    except Exception:
        return False

    # A loop saves the starts of kernels and copies between them, but computes more slowly.
    flops = sum(op.flops for op in work)
    if runner.replicas.on_gpus:
        return flops <= MOST_FLOPS and all(op.times == 1 for op in work)
    starts = sum(op.times for op in work if op.type not in NO_KERNEL)
    saved = FLOPS_OF_START * starts + FLOPS_OF_BYTE * sum(op.moved_bytes for op in work)
    # An operation in a loop of unknown length counts as run 0 times.
    slow = any("Conv" in op.type or not op.times for op in work)
    return flops <= saved and not slow


def steps_per_program(runner: StepRunner, rows: Any, most: int) -> int:
    """Returns how many steps, at most `most`, one program of XLA should run in a loop.

    It is 1 where a loop does not pay.
    runner: has the compiled step.
    """
    if runner.replicas.count > 1 or not gains_by_loop(runner, rows):
        return 1
    bytes_of_program = MOST_BYTES[runner.replicas.devices[0][:3]]
    return max(1, min(MOST_STEPS, most, bytes_of_program // max(1, runner.bytes_of_step)))
