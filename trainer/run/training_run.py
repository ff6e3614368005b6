"""Trains one run from its restored state to its last step, and saves variables and all other
state."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import keras
from keras.callbacks import CallbackList

from trainer.base.log import log
from trainer.base.run_files.goodput import COMPILATION, EVENTS, INPUT, OTHER, SAVE, STEP
from trainer.base.run_files.job_files import Result, Scalars
from trainer.base.settings.own_settings import has_own_code
from trainer.base.settings.rules import check_known
from trainer.cluster.devices import fast_precision
from trainer.measures.evaluation import Evaluation, evaluation
from trainer.measures.fid import Fid
from trainer.reporting.progress import Progress, StepLogs, WorkerWaits
from trainer.run.rehearsal import rehearse
from trainer.run.run_state import RunState, SavedState
from trainer.run.start import StartedJob
from trainer.run.step_program import MOST_STEPS, StepProgram
from trainer.run.training_setup import TrainingSetup
from trainer.training.callbacks import (
    higher_is_better,
    most_steps_of_a_call,
    refuse_unevaluated,
    stop_reason,
)
from trainer.training.checkpoint import Checkpoints, digest_of, snapshot, variables_of
from trainer.training.loop import CallSize, Control, Hook, Interrupted, TrainingLoop
from trainer.training.signals import StopRequest
from trainer.training.step_profile import StepProfile
from trainer.user_code.interface import ModelInterface

TIMED_STEPS = 20  # of which it is known how long a step takes
LONG_RUN_S = 60.0  # of a shorter run nobody needs more speed
SLOW_STEP_S = 0.005  # the products of a shorter step take too little of its time for 16 bits to pay


@dataclass
class TrainingRun:
    """Holds the parts of one run, ready to train."""

    job: StartedJob
    setup: TrainingSetup
    checkpoints: Checkpoints
    state: RunState
    earlier: Mapping[str, Any]  # run.json of an earlier start of this same run; else {}
    before_hooks: SavedState | None = None  # the state that a signal during the hooks saves
    means: Scalars = field(default_factory=dict)  # of the newest epoch
    rehearses: bool = True  # whether a new run tries, before training, what it does at the end
    # after which epochs the model is evaluated, as in `fit`
    validation_freq: int | Sequence[int] = 1

    def save(self, *, pending: bool = False) -> None:
        """Saves a checkpoint and writes result.json.

        `pending`: with the state before this step's hooks ran.
        """
        self.state.best.improved = False
        state = self.before_hooks if pending else None
        with self.job.result.goodput.within(SAVE):
            self.checkpoints.save(self.state.progress.run_step, vars(state or self.state.content()))
            self.write_result("running")

    def write_result(self, state: str, error: str | None = None) -> None:
        """Replaces result.json, on the chief.

        At the end of a run it has a digest of the variables, if their bits are promised.
        """
        job = self.job
        job.result.saving_seconds = self.checkpoints.saving_seconds
        measured: Result = {
            **self.state.reporter.summary(),
            "history": self.state.values_of_epochs(),
        }
        virtual_replicas = job.config.virtual_replicas
        promised = virtual_replicas and not job.result.depends_on_replicas
        if job.cluster.is_chief and state != "running" and promised:
            digest = digest_of(snapshot(variables_of(self.setup.model)))
            measured["equal_bits"] = {"virtual_replicas": virtual_replicas, "sha256": digest}
        job.result.write(state, measured, error)

    def train(self, stop: StopRequest) -> Control:
        """Trains to the last step, or until a signal, the budget or a callback ends it.

        It saves, and returns what ended it.
        """
        job = self.job
        setup = self.setup
        state = self.state
        config = job.config
        progress = state.progress

        # What may end the run early, what evaluates it; and a trial of the user's own code before
        # hours of training.
        budget = 60 * (config.max_minutes or math.inf) - job.result.wall_seconds
        save_every = 60 * config.checkpoint_every_minutes or math.inf
        control = Control(setup.replicas, stop, save_every, budget)
        watched = control.watched()
        evaluate = evaluation(setup.model, watched, setup.dataset, config.evaluation_batch)
        if self.rehearses and has_own_code(config) and job.cluster.is_chief and not state.saved:
            rehearse(setup, evaluate)

        # What runs between calls to the device. Hooks that a signal has left out run now.
        names = evaluate.names if evaluate else ()
        chief = job.cluster.is_chief
        callbacks = state.begin_callbacks(
            setup.model,
            names,
            # The folder of the run may lie on a disk of all machines.
            lambda path: (
                chief
                or (job.cluster.writes(path) and not Path(path).is_relative_to(config.job_dir))
            ),
        )
        profile = StepProfile(config.profiled, job.job_dir.logs if chief else None, progress)
        hooks = [*RunHooks(self, callbacks, evaluate, control).sequence(), profile.cuts]
        loop = TrainingLoop(setup.model, progress, hooks, callbacks, control)
        if state.pending:
            loop.run_due_hooks()

        # The program of the steps, and how many of them a call and a program may have.
        program = StepProgram(job, setup, progress, stop)
        several = getattr(setup.model, "steps_per_execution", 1)
        most_steps = most_steps_of_a_call(state.callbacks, config.steps_per_loop, several)
        if not (progress.ends or control):
            log.info(
                "builds the training step: seconds, or minutes for a large model with several"
                " replicas"
            )
            intervals = [hook.every for hook in hooks if hook.every]
            with job.result.goodput.within(COMPILATION):
                program.choose(min([most_steps or MOST_STEPS, *intervals]))

        # Trains, saves the end, and lets callbacks end.
        with closing(profile):
            calls = CallRecord(job, state, program, profile)
            loop.train(CallSize(most_steps), program, calls.begin, calls.end)
        job.result.goodput.enter(SAVE)  # the rest of the run counts as saving, the export too
        self.save(pending=bool(control.signal))
        self.checkpoints.wait()
        if not control.signal:
            # It may restore older weights, so it comes after the checkpoint.
            callbacks.on_train_end(self.means)
        return control


@dataclass
class CallRecord:
    """Records each call to the device: its seconds, its FLOPs, waiting workers, a profile."""

    job: StartedJob
    state: RunState
    program: StepProgram
    profile: StepProfile
    waits: WorkerWaits = field(default_factory=WorkerWaits)

    def begin(self) -> None:
        """Begins a call: the other workers expect it to end in time."""
        if self.job.peers:
            self.job.peers.begin_call()
        self.profile.before_call()
        self.job.result.goodput.enter(STEP if self.state.progress.first_call_ended else COMPILATION)

    def end(self, logs: StepLogs) -> Scalars:
        """Ends a call; returns the epoch's means so far."""
        progress = self.state.progress
        result = self.job.result
        progress.flops = progress.flops or self.program.runner.flops
        phase = result.goodput.phase
        result.goodput.enter(OTHER)
        if phase == STEP:
            result.goodput.move(min(progress.call_seconds, logs.input_wait_seconds), STEP, INPUT)
            if slow := self.waits.count(logs.waits, progress.call_seconds):
                why = f"the others wait for its batches, {slow[1]:.0%} of the time of all steps"
                result.name_slow(self.job.cluster.name(slow[0]), why)
            timed = progress.whole.timed_steps
            if timed - logs.count < TIMED_STEPS <= timed:  # once in a run
                self._name_fast_precision()
        self.profile.after_call()
        return self.state.reporter.on_call(logs)

    def _name_fast_precision(self) -> None:
        """Logs the precision that may be faster, if none was named and steps are not short."""
        job = self.job
        in_float32 = keras.config.dtype_policy().name == "float32"
        unnamed = in_float32 and "precision" not in job.named
        whole = self.state.progress.whole
        slow = whole.timed_seconds - whole.waited_seconds > SLOW_STEP_S * whole.timed_steps
        is_long = (whole.step_seconds or 0.0) * self.state.progress.total_steps > LONG_RUN_S
        on_gpus = self.program.setup.replicas.on_gpus
        if (
            unnamed
            and slow
            and is_long
            and job.cluster.is_chief
            and (name := fast_precision(on_gpus=on_gpus))
        ):
            units = "these GPUs have tensor cores" if on_gpus else "this processor has the units"
            log.info(
                f"--precision={name} may make these steps 1.2 to 4 times as fast, in other numbers:"
                f" {units} for 16 bits"
            )


@dataclass
class RunHooks:
    """Evaluates, ends epochs, reports and saves, between calls to the device."""

    run: TrainingRun
    callbacks: CallbackList
    evaluate: Evaluation | None
    control: Control

    def sequence(self) -> list[Hook]:
        """Returns the hooks in the order in which they run.

        Raises UserError if the run does not measure `best_metric`. The first one copies the state;
        a signal during the others saves it, so that they run again on resume. The end of an epoch
        comes early, as it may stop the run. The checkpoint comes last.
        """
        config = self.run.job.config
        model = self.run.setup.model
        evaluate = self.evaluate
        best = self.run.state.best
        reporter = self.run.state.reporter
        fid = None
        if config.fid_every_steps:
            images = self.run.setup.dataset.images("train")
            fid = Fid(config, model, images, self.control.watched())

        # The reporter learns what is measured, and a best_metric that is not is refused.
        reporter.metric_names = [*(evaluate.names if evaluate else ()), *(fid.names if fid else ())]
        monitors = [getattr(callback, "monitor", "") for callback in self.callbacks.callbacks]
        reporter.monitored = {config.best_metric, config.tuning_metric, *monitors}
        if best_metric := config.best_metric:
            if best_metric.startswith("val_") and not evaluate:
                refuse_unevaluated("best_metric", best_metric, ())
            check_known("best_metric", best_metric, "this run measures", reporter.metric_names)
            higher_is_better(model, best_metric, "best_metric")

        # At an epoch's end the model is evaluated before callbacks see the values.
        epoch = self.run.setup.schedule.steps_per_epoch
        hooks = [Hook(0, self._copy_state, requested=lambda: True)]
        if evaluate:
            validate = partial(self._measure, self._evaluate_as_fit, reporter.evaluated)
            after_epochs = partial(self._after_epochs, self.run.validation_freq, validate)
            hooks.append(Hook(epoch, after_epochs))

        # This hook also ends calls to the device at epoch ends, so that the seconds of each epoch
        # can be measured. A callback that stops the run within an epoch ends that epoch, as in
        # `fit`.
        hooks.append(
            Hook(epoch, self._end_epoch, at_end=False, requested=lambda: bool(model.stop_training))
        )

        # Reports and measures of images have intervals of their own.
        hooks.append(Hook(config.report_every_steps, reporter.report))
        if evaluate and evaluate.class_count:
            hooks.append(Hook(0, lambda progress: reporter.classified(progress, evaluate.classes)))
        if fid:
            report = partial(reporter.quality, about=fid.about)
            hooks.append(Hook(config.fid_every_steps, partial(self._measure, fid, report)))
        interface = ModelInterface.of(model)
        if sampler := interface.sampler:
            draw = partial(reporter.sample, sampler, interface.generated_classes)
            timed_draw = self.run.job.result.goodput.within(EVENTS)(draw)
            hooks.append(Hook(config.sample_every_steps, timed_draw))

        every = config.checkpoint_every_steps
        hooks.append(
            Hook(
                every,
                lambda progress: self.run.save(),
                requested=lambda: self.control.save_due or best.improved,
            )
        )
        return hooks

    def _copy_state(self, progress: Progress) -> None:
        """Keeps what a signal saves that comes before the other hooks have run.

        Raises Interrupted if it has come.
        """
        content = self.run.state.content(pending=True)
        # The arrays are not copied again, as `content` has copied them.
        copied = {id(array): array for array in content.arrays.values()}
        self.run.before_hooks = copy.deepcopy(content, copied)
        if self.control.signal:
            raise Interrupted

    def _end_epoch(self, progress: Progress) -> None:
        """Reports the epoch and runs callbacks, as `fit` does at its end."""
        means = self.run.state.reporter.epoch_end()
        self.run.means = means
        self.callbacks.on_epoch_end(math.ceil(progress.epoch) - 1, means)
        self.control.agree_to_stop(self.run.setup.model)
        if self.run.setup.model.stop_training:
            epoch = math.ceil(progress.epoch)
            log.info(f"ends after epoch {epoch}: {stop_reason(self.callbacks.callbacks)}")
        if not (progress.finished or self.run.setup.model.stop_training):
            self.run.setup.model.reset_metrics()
            self.callbacks.on_epoch_begin(int(progress.epoch))

    def _after_epochs(
        self, frequency: int | Sequence[int], act: Callable[[Progress], None], progress: Progress
    ) -> None:
        """Acts after every so many epochs, or after these.

        It also acts at the end of a run within an epoch.
        """
        number = progress.epoch
        due = number % frequency == 0 if isinstance(frequency, int) else number in frequency
        if due or not number.is_integer():
            act(progress)

    def _measure(
        self, measure: Callable[[], Scalars], report: Callable[..., None], progress: Progress
    ) -> None:
        """Measures, reports the values, and saves the step later if it is the best one."""
        best = self.run.state.best
        with self.run.job.result.goodput.within(EVENTS):
            values = measure()
        report(progress, values)
        best.consider(values, progress.run_step)
        # All workers must save together, but only the chief has the measures of images.
        best.improved = bool(self.run.setup.replicas.sum_over_workers([best.improved])[0])

    def _evaluate_as_fit(self) -> Scalars:
        """Returns the values of an evaluation, around which callbacks run."""
        assert self.evaluate
        self.callbacks.on_test_begin()
        # `fit` has no evaluation at the end of a run within an epoch.
        if self.run.state.progress.epoch.is_integer():
            self.evaluate.reset()
        values = self.evaluate()
        self.callbacks.on_test_end(
            {name.removeprefix("val_"): value for name, value in values.items()}
        )
        return values
