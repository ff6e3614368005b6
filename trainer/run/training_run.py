"""Trains one run from its restored state to its last step, and saves its state."""

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import keras

from trainer.base.log import log
from trainer.base.run_files.goodput import COMPILATION, EVENTS, INPUT, OTHER, SAVE, STEP
from trainer.base.run_files.records import Result, mapping
from trainer.base.settings.rules import check_known
from trainer.measures.evaluation import Evaluation, evaluation
from trainer.measures.fid import make_fid
from trainer.measures.profiling import StepProfile
from trainer.reporting.progress import Progress, StepLogs, WorkerWaits
from trainer.run.rehearsal import has_own_parts, rehearse
from trainer.run.run_state import RunState
from trainer.run.start import StartedJob
from trainer.run.training_setup import TrainingSetup
from trainer.training.callbacks import bind, most_steps_of_a_call, refuse_unevaluated, rises
from trainer.training.checkpoint import Checkpoints
from trainer.training.error_lines import is_out_of_memory
from trainer.training.loop import CallSize, Hook, run_due_hooks, train
from trainer.training.preemption import Control, Interrupted, StopRequest
from trainer.training.state import digest_of, sharded, snapshot, variables_of
from trainer.training.xla_choice import XlaChoice, choose, failure_of, not_compiled
from trainer.user_code.interface import ModelInterface


@dataclass
class TrainingRun:
    """Holds the parts of one run, ready to train."""

    job: StartedJob
    setup: TrainingSetup
    checkpoints: Checkpoints
    state: RunState
    earlier: Mapping[str, Any]  # run.json, if an earlier start was of this very run
    choice: XlaChoice | None = None  # of plain or compiled steps
    before_hooks: dict[str, Any] = field(default_factory=dict)  # the state that a signal during the hooks saves

    def __post_init__(self) -> None:
        self.choice = XlaChoice.read(mapping(self.earlier, "compilation"))

    def save(self, *, pending: bool = False) -> None:
        """Saves the current step; with `pending`, the state before this step's hooks ran. Then updates result.json."""
        self.state.best.improved = False
        with self.job.result.goodput.within(SAVE):
            self.checkpoints.save(self.state.progress.step, self.before_hooks if pending else self.state.content())
            self.write_result("running")

    def write_result(self, state: str, error: str | None = None) -> None:
        """Replaces result.json, on the chief."""
        self.job.result.saving_seconds = self.checkpoints.saving_seconds
        measured: Result = {**self.state.reporter.summary(), "history": self.state.values_of_epochs()}
        if self.job.is_chief and state != "running" and (digest := self._digest()):
            measured["equal_bits"] = {"virtual_replicas": self.job.config.virtual_replicas, "sha256": digest}
        self.job.result.write(state, measured, error)

    def _digest(self) -> str:
        """Returns the SHA-256 of all variables where --virtual_replicas promises equal bits, "" elsewhere.

        A worker has not all parts of slots that are sharded over several.
        """
        if not self.job.config.virtual_replicas or self.job.result.depends_on_replicas:
            return ""
        variables = variables_of(self.setup.model)
        parted = self.setup.replicas.cluster.several and sharded(variables)
        return "" if parted else digest_of(snapshot(variables))

    def train(self, stop: StopRequest) -> Control:
        """Trains until the last step, or until a signal, the budget or a callback stops it, and saves the state."""
        config, model, state, goodput = self.job.config, self.setup.model, self.state, self.job.result.goodput
        progress, peers, result = state.progress, self.job.peers, self.job.result
        budget = 60 * config.max_minutes - result.wall_seconds if config.max_minutes else None
        control = Control(self.setup.replicas, stop, 60 * config.checkpoint_every_minutes or None, budget)
        evaluate = evaluation(model, control.watched(), self.setup.dataset, config.evaluation_batch)
        if has_own_parts(config) and self.job.is_chief and not state.restored:
            rehearse(self.setup, evaluate)
        callbacks = bind([*state.callbacks, state.history], model, progress, evaluate.names if evaluate else ())
        model.stop_training = False
        callbacks.on_train_begin()
        state.resume_callbacks()
        callbacks.on_epoch_begin((progress.step - state.pending) // progress.steps_per_epoch)
        hooks = self._hooks(callbacks, evaluate, control)
        if state.pending:
            run_due_hooks(hooks, progress, model)
        runner, rows, waits = self.setup.step_runner(), self.setup.rows_from(progress.step), WorkerWaits()
        if not (progress.ends or control):
            log.info("builds the training step: seconds, or minutes for a large model with several replicas")
            with goodput.within(COMPILATION):
                compiled = self.setup.step_runner(compiled=True)
                left, operations = progress.total_steps - progress.step, partial(compiled.size, rows)
                replicas, failure = self.setup.replicas, self.job.xla_failure
                self._keep(choose(config, model, replicas, left, operations, self.choice, failure))
            runner = compiled if self.choice and self.choice.compiled else runner

        def run_steps(first_step: int, count: int) -> StepLogs:
            nonlocal runner, rows
            # The first call is of one step, which XLA compiles before it runs anything: if that fails, or a signal
            # comes meanwhile, no variable has changed.
            compiles = stop.nothing_to_save = runner.compiled and not progress.first_call_ended
            try:
                return runner(rows, first_step, count)
            except Exception as error:
                if not compiles or is_out_of_memory(error):
                    raise
                self._keep(not_compiled(failure_of(error), model))
            finally:
                stop.nothing_to_save = False
            runner, rows = self.setup.step_runner(), self.setup.rows_from(first_step)
            return runner(rows, first_step, count)

        profile = StepProfile(config.profiled, self.job.job_dir.logs if self.job.is_chief else None, progress)

        def begin() -> None:
            if peers:
                peers.begin_call()
            profile.before_call()
            goodput.enter(STEP if progress.first_call_ended else COMPILATION)

        def on_call(progress: Progress, logs: StepLogs) -> dict[str, float]:
            phase = goodput.phase
            goodput.enter(OTHER)
            if phase == STEP:
                goodput.move(min(progress.call_seconds, logs.input_wait_seconds), STEP, INPUT)
                if slow := waits.count(logs.waits, progress.call_seconds):
                    why = f"the others wait for its batches, {slow[1]:.0%} of the time of all steps"
                    result.name_slow(self.job.cluster.name(slow[0]), why)
            profile.after_call()
            return state.reporter.on_call(progress, logs)

        with closing(profile):
            size = CallSize(most_steps_of_a_call(state.callbacks, config.steps_per_loop))
            train(run_steps, model, progress, [*hooks, profile.cuts], callbacks, on_call, size, control, begin)
        goodput.enter(SAVE)  # until the end, with the export
        self.save(pending=bool(control.signal))
        self.checkpoints.wait()
        if not control.signal:
            callbacks.on_train_end()  # which may restore older weights: a run that goes on needs the newest
        return control

    def _keep(self, choice: XlaChoice) -> None:
        """Takes the choice of plain or of compiled steps, and writes it to run.json."""
        self.choice = choice
        if self.job.is_chief:
            self.job.job_dir.add_to_run_info(compilation=asdict(choice))

    def _hooks(
        self, callbacks: keras.callbacks.CallbackList, evaluate: Evaluation | None, control: Control
    ) -> list[Hook]:
        """Returns the hooks that run between calls to the device, in order: they report, measure, and end epochs.

        The first copies the state for a signal to save, so that all others run on resume. An epoch's end may stop the
        run: it comes early. The checkpoint is the last.
        """
        config, model, best, reporter = self.job.config, self.setup.model, self.state.best, self.state.reporter
        data, interface, during_events = self.setup.dataset, ModelInterface.of(model), self.job.result.goodput.within
        epoch, fid = self.setup.schedule.steps_per_epoch, None
        if config.fid_every_steps:
            fid = make_fid(config, model, data.images("train"), control.watched())
        reporter.metric_names = [*(evaluate.names if evaluate else ()), *(fid.names if fid else ())]
        _check_best_metric(config.best_metric, model, evaluate, reporter.metric_names)

        def begin(progress: Progress) -> None:
            self.before_hooks = copy.deepcopy(self.state.content(pending=True))
            if control.signal:
                raise Interrupted

        def end_epoch(progress: Progress) -> None:
            means = reporter.epoch_end(progress)
            callbacks.on_epoch_end(math.ceil(progress.epoch) - 1, means)
            control.agree_to_stop(model)
            if not (progress.ends or model.stop_training):
                callbacks.on_epoch_begin(int(progress.epoch))

        def measuring(measure: Callable[[], dict[str, float]], report: Callable[..., None]) -> Callable[..., None]:
            def act(progress: Progress) -> None:
                with during_events(EVENTS):
                    values = measure()
                report(progress, values)
                best.consider(values, progress.step)
                # On all workers, as the chief alone knows what images are worth.
                best.improved = bool(self.setup.replicas.sum_over_workers([best.improved])[0])

            return act

        hooks = [Hook(0, begin, requested=lambda: True)]
        if evaluate:
            hooks.append(Hook(epoch, measuring(evaluate, reporter.evaluated)))
        # Calls are cut at epoch ends too: an epoch's seconds are then measured, not apportioned.
        # A callback that stops the run within an epoch ends that epoch, as in `fit`.
        hooks.append(Hook(epoch, end_epoch, at_end=False, requested=lambda: bool(model.stop_training)))
        hooks.append(Hook(config.report_every_steps, reporter.report))
        if evaluate and evaluate.counts_classes:
            hooks.append(Hook(0, lambda progress: reporter.classified(progress, evaluate.classes)))
        if fid:
            hooks.append(Hook(config.fid_every_steps, measuring(fid, partial(reporter.quality, about=fid.about))))
        if sampler := interface.sampler:
            draw = partial(reporter.sample, sampler.sample, sampler.latent_dim, interface.generated_classes)
            hooks.append(Hook(config.sample_every_steps, during_events(EVENTS)(draw)))

        def save_requested() -> bool:
            return control.save_due or best.improved

        return [*hooks, Hook(config.checkpoint_every_steps, lambda progress: self.save(), requested=save_requested)]


def _check_best_metric(name: str, model: keras.Model, evaluate: Evaluation | None, measured: list[str]) -> None:
    """Raises UserError if the run does not measure the metric by which one checkpoint is the best."""
    if name.startswith("val_") and not evaluate:
        refuse_unevaluated("best_metric", name, ())
    check_known("best_metric", name, "this run measures", measured)
    if name:
        rises(model, name, "best_metric")
