"""Trains one run from its restored state to its last step, and saves variables and all other state."""

import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, SupportsFloat

import keras

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.base.run_files.goodput import COMPILATION, EVENTS, INPUT, OTHER, SAVE, STEP
from trainer.base.run_files.job_files import Result
from trainer.base.settings.rules import IMAGE_MEASURES, check_known
from trainer.base.settings.train_config import TrainConfig
from trainer.measures.evaluation import Evaluation, evaluation
from trainer.measures.fid import Fid
from trainer.reporting.error_lines import is_out_of_memory
from trainer.reporting.progress import Progress, StepLogs, WorkerWaits, numbers
from trainer.reporting.reporter import Reporter
from trainer.run.rehearsal import has_own_parts, rehearse
from trainer.run.replica_check import LaterReplicaChecks, needs_check
from trainer.run.start import StartedJob
from trainer.run.training_setup import TrainingSetup
from trainer.training.callbacks import (
    callback_list,
    higher_is_better,
    most_steps_of_a_call,
    refuse_unevaluated,
    restore_callbacks,
    state_of_callbacks,
)
from trainer.training.checkpoint import Checkpoints, LearningRates, digest_of, sharded, snapshot, variables_of
from trainer.training.loop import CallSize, Control, Hook, Interrupted, StepProfile, StopRequest, run_due_hooks, train
from trainer.training.xla_choice import MOST_AT_ONCE, XlaChoice, choose, failure_of, not_compiled, steps_of_a_program
from trainer.user_code.interface import ModelInterface


class Best:
    """Holds the best value of one metric so far, and its step.

    The metric is `best_metric`; without it, the first that is measured of: that of `early_stopping`, val_accuracy, FID,
    val_loss. A value that is not comparable (another metric, or FID by other features or image counts) replaces the
    best one; NaN never does.
    """

    def __init__(self, config: TrainConfig, model: keras.Model) -> None:
        self._model = model
        defaults = [config.early_stopping, "val_accuracy", "fid", "val_loss"]
        self._names = [config.best_metric] if config.best_metric else defaults
        self._features = f"{config.fid_features}, {config.fid_weights}, {config.fid_samples} images"
        self.state: dict[str, Any] = {}  # {"metric", "features", "value", "step"}; {} if nothing has been measured
        self.improved = False  # whether a measurement has improved it since the last checkpoint

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restores the `state` of an earlier start."""
        if state and state["value"] is not None:
            self.state = {
                "metric": state["metric"], "features": state["features"],
                "value": float(state["value"]), "step": int(state["step"]),
            }  # fmt: skip

    def consider(self, values: Mapping[str, float], step: int) -> None:
        """Replaces the best value by this measurement if that is better, not comparable, or the first."""
        metric = next((name for name in self._names if name in values), None)
        if metric is None or math.isnan(values[metric]):
            return
        features = self._features if metric in IMAGE_MEASURES else None
        now: dict[str, Any] = {"metric": metric, "features": features, "value": values[metric], "step": step}
        comparable = all(self.state.get(part) == now[part] for part in ("metric", "features"))
        better = operator.gt if higher_is_better(self._model, metric, "best_metric") else operator.lt
        if not comparable or better(now["value"], self.state["value"]):
            self.state, self.improved = now, True


@dataclass
class RunState:
    """Holds what a checkpoint keeps besides variables: progress, measurements, and the state of callbacks."""

    progress: Progress
    reporter: Reporter
    best: Best
    callbacks: list[keras.callbacks.Callback]
    rates: LearningRates
    restored: Mapping[str, Any]  # the content of the checkpoint that the run resumes from; {} for a new run
    origin: str = ""  # the address of that checkpoint
    history: keras.callbacks.History = field(default_factory=keras.callbacks.History)

    @property
    def pending(self) -> bool:
        """Returns whether the hooks of the restored step must still run, because a signal came first."""
        return bool(self.restored.get("pending"))

    def values_of_epochs(self) -> dict[str, list[float]]:
        """Returns the values of each epoch so far, by name, like History.history of `fit`."""
        return {
            name: [float(value) for value in values if isinstance(value, SupportsFloat)]
            for name, values in self.history.history.items()
        }

    def content(self, *, pending: bool = False) -> dict[str, Any]:
        """Returns what a checkpoint stores; `pending`: the hooks of this step have not run."""
        return {
            **self.progress.state(),
            "reporter": self.reporter.state(),
            "callbacks": state_of_callbacks(self.callbacks),
            "history": self.values_of_epochs(),
            "learning_rates": self.rates.state(),
            "best": self.best.state,
            "pending": pending,
        }

    def resume(self) -> None:
        """Restores everything but callbacks. Raises UserError if another version has stored the state."""
        if self.restored:
            with self._refusing_other_versions():
                self.progress.resume(self.restored)
                self.reporter.resume(self.restored["reporter"])
                self.best.resume(self.restored["best"])

    def resume_callbacks(self) -> None:
        """Restores callbacks and learning rates, after on_train_begin, in which Keras's callbacks reset them."""
        if self.restored:
            with self._refusing_other_versions():
                restore_callbacks(self.callbacks, self.restored["callbacks"])
                self.history.history = {
                    name: [*numbers(dict(enumerate(values))).values()]
                    for name, values in self.restored["history"].items()
                }
                self.rates.resume(self.restored["learning_rates"])

    @contextmanager
    def _refusing_other_versions(self) -> Iterator[None]:
        """Turns errors that state of another version raises, within the block, into a UserError."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(
                f"{self.origin}: its state is of another version of this trainer ({error!r}): use that version, or "
                "another --job_dir"
            ) from error


@dataclass
class TrainingRun:
    """Holds the parts of one run, ready to train."""

    job: StartedJob
    setup: TrainingSetup
    checkpoints: Checkpoints
    state: RunState
    earlier: Mapping[str, Any]  # run.json of an earlier start of this same run; else {}
    choice: XlaChoice | None  # whether XLA compiles the steps; at first that of the earlier start
    before_hooks: dict[str, Any] = field(default_factory=dict)  # the state that a signal during the hooks saves

    def save(self, *, pending: bool = False) -> None:
        """Saves a checkpoint and writes result.json; `pending`: with the state before this step's hooks ran."""
        self.state.best.improved = False
        with self.job.result.goodput.within(SAVE):
            self.checkpoints.save(self.state.progress.step, self.before_hooks if pending else self.state.content())
            self.write_result("running")

    def write_result(self, state: str, error: str | None = None) -> None:
        """Replaces result.json, on the chief; at the end with a digest of the variables if their bits are promised."""
        self.job.result.saving_seconds = self.checkpoints.saving_seconds
        measured: Result = {**self.state.reporter.summary(), "history": self.state.values_of_epochs()}
        virtual_replicas = self.job.config.virtual_replicas
        promised = virtual_replicas and not self.job.result.depends_on_replicas
        if self.job.cluster.is_chief and state != "running" and promised:
            variables = variables_of(self.setup.model)
            if not (self.setup.replicas.cluster.several and sharded(variables)):  # a worker has only parts of them
                digest = digest_of(snapshot(variables))
                measured["equal_bits"] = {"virtual_replicas": virtual_replicas, "sha256": digest}
        self.job.result.write(state, measured, error)

    def train(self, stop: StopRequest) -> Control:
        """Trains to the last step, or until a signal, the budget or a callback ends it; saves, and returns what did."""
        config, model, state, goodput = self.job.config, self.setup.model, self.state, self.job.result.goodput
        progress, peers, result = state.progress, self.job.peers, self.job.result
        budget = 60 * config.max_minutes - result.wall_seconds if config.max_minutes else None
        control = Control(self.setup.replicas, stop, 60 * config.checkpoint_every_minutes or None, budget)
        evaluate = evaluation(model, control.watched(), self.setup.dataset, config.evaluation_batch)
        if has_own_parts(config) and self.job.cluster.is_chief and not state.restored:
            rehearse(self.setup, evaluate)
        callbacks = callback_list(
            [*state.callbacks, state.history], model, progress, evaluate.names if evaluate else ()
        )
        model.stop_training = False
        callbacks.on_train_begin()
        state.resume_callbacks()
        callbacks.on_epoch_begin((progress.step - state.pending) // progress.steps_per_epoch)
        hooks = self._hooks(callbacks, evaluate, control)
        later_checks = None
        if needs_check(config, self.setup.replicas.count):
            later_checks = LaterReplicaChecks(self.job, self.setup, progress)
            hooks.append(later_checks.hook())
        if state.pending:
            run_due_hooks(hooks, progress, model)
        runner, rows, waits = self.setup.step_runner(), self.setup.rows_from(progress.step), WorkerWaits()
        most_steps = most_steps_of_a_call(state.callbacks, config.steps_per_loop)
        if not (progress.ends or control):
            log.info("builds the training step: seconds, or minutes for a large model with several replicas")
            with goodput.within(COMPILATION):
                compiled = self.setup.step_runner(compiled=True)
                left = progress.total_steps - progress.step
                choice = choose(config, model, self.setup.replicas, left, partial(compiled.size, rows), self.choice)
                if choice.compiled:
                    at_once = steps_of_a_program(
                        compiled, rows, min([most_steps or MOST_AT_ONCE, *(hook.every for hook in hooks if hook.every)])
                    )
                    if at_once > 1:
                        log.info(f"jit_compile: a program of XLA runs up to {at_once} steps")
                        compiled = self.setup.step_runner(compiled=True, at_once=at_once)
                        rows = self.setup.rows_from(progress.step, at_once)
                    runner = compiled
                self._keep_choice(replace(choice, at_once=runner.at_once))

        def run_steps(first_step: int, count: int) -> StepLogs:
            nonlocal runner, rows
            # The first call is of one step, and XLA compiles it before anything runs. So if that fails, or a signal
            # arrives during it, no variable has changed.
            compiles = stop.nothing_to_save = runner.compiled and not progress.first_call_ended
            try:
                return runner(rows, first_step, count)
            except Exception as error:
                if not compiles or is_out_of_memory(error):
                    raise
                self._keep_choice(not_compiled(failure_of(error)))
            finally:
                stop.nothing_to_save = False
            runner, rows = self.setup.step_runner(), self.setup.rows_from(first_step)
            return runner(rows, first_step, count)

        profile = StepProfile(config.profiled, self.job.job_dir.logs if self.job.cluster.is_chief else None, progress)

        def begin() -> None:
            if peers:
                peers.begin_call()
            profile.before_call()
            goodput.enter(STEP if progress.first_call_ended else COMPILATION)

        def on_call(progress: Progress, logs: StepLogs) -> dict[str, float]:
            progress.flops = progress.flops or runner.flops
            phase = goodput.phase
            goodput.enter(OTHER)
            if phase == STEP:
                goodput.move(min(progress.call_seconds, logs.input_wait_seconds), STEP, INPUT)
                if slow := waits.count(logs.waits, progress.call_seconds):
                    why = f"the others wait for its batches, {slow[1]:.0%} of the time of all steps"
                    result.name_slow(self.job.cluster.name(slow[0]), why)
            profile.after_call()
            return state.reporter.on_call(progress, logs)

        with closing(profile), closing(later_checks) if later_checks else nullcontext():
            calls = CallSize(most_steps)
            train(run_steps, model, progress, [*hooks, profile.cuts], callbacks, on_call, calls, control, begin)
        goodput.enter(SAVE)  # the rest of the run counts as saving, the export too
        self.save(pending=bool(control.signal))
        self.checkpoints.wait()
        if not control.signal:
            callbacks.on_train_end()  # may restore older weights, so it comes after the checkpoint
        return control

    def _keep_choice(self, choice: XlaChoice) -> None:
        """Takes the choice between plain and compiled steps, and writes it to run.json."""
        self.choice = choice
        if self.job.cluster.is_chief:
            self.job.job_dir.add_to_run_info(compilation=asdict(choice))

    def _hooks(
        self, callbacks: keras.callbacks.CallbackList, evaluate: Evaluation | None, control: Control
    ) -> list[Hook]:
        """Returns the hooks that run between calls to the device, in order: they evaluate, end epochs, report and save.

        The first one copies the state; a signal during the others saves it, so that they run again on resume.
        The end of an epoch comes early, as it may stop the run. The checkpoint comes last.
        """
        config, model, best, reporter = self.job.config, self.setup.model, self.state.best, self.state.reporter
        data, interface, during_events = self.setup.dataset, ModelInterface.of(model), self.job.result.goodput.within
        epoch, fid = self.setup.schedule.steps_per_epoch, None
        if config.fid_every_steps:
            fid = Fid(config, model, data.images("train"), control.watched())
        reporter.metric_names = [*(evaluate.names if evaluate else ()), *(fid.names if fid else ())]
        if best_metric := config.best_metric:  # refuses a metric that this run does not measure
            if best_metric.startswith("val_") and not evaluate:
                refuse_unevaluated("best_metric", best_metric, ())
            check_known("best_metric", best_metric, "this run measures", reporter.metric_names)
            higher_is_better(model, best_metric, "best_metric")

        def begin(progress: Progress) -> None:
            self.before_hooks = copy.deepcopy(self.state.content(pending=True))
            if control.signal:
                raise Interrupted

        def end_epoch(progress: Progress) -> None:
            callbacks.on_epoch_end(math.ceil(progress.epoch) - 1, reporter.epoch_end(progress))
            control.agree_to_stop(model)
            if not (progress.ends or model.stop_training):
                callbacks.on_epoch_begin(int(progress.epoch))

        def reporting(measure: Callable[[], dict[str, float]], report: Callable[..., None]) -> Callable[..., None]:
            def act(progress: Progress) -> None:
                with during_events(EVENTS):
                    values = measure()
                report(progress, values)
                best.consider(values, progress.step)
                # All workers must save together, but only the chief has the measures of images.
                best.improved = bool(self.setup.replicas.sum_over_workers([best.improved])[0])

            return act

        def evaluate_as_fit() -> dict[str, float]:
            assert evaluate
            callbacks.on_test_begin()
            values = evaluate()
            callbacks.on_test_end({name.removeprefix("val_"): value for name, value in values.items()})
            return values

        hooks = [Hook(0, begin, requested=lambda: True)]
        if evaluate:
            hooks.append(Hook(epoch, reporting(evaluate_as_fit, reporter.evaluated)))
        # This hook also ends calls to the device at epoch ends, so that the seconds of each epoch can be measured.
        # A callback that stops the run within an epoch ends that epoch, as in `fit`.
        hooks.append(Hook(epoch, end_epoch, at_end=False, requested=lambda: bool(model.stop_training)))
        hooks.append(Hook(config.report_every_steps, reporter.report))
        if evaluate and evaluate.class_count:
            hooks.append(Hook(0, lambda progress: reporter.classified(progress, evaluate.classes)))
        if fid:
            hooks.append(Hook(config.fid_every_steps, reporting(fid, partial(reporter.quality, about=fid.about))))
        if sampler := interface.sampler:
            draw = partial(reporter.sample, sampler.sample, sampler.latent_dim, interface.generated_classes)
            hooks.append(Hook(config.sample_every_steps, during_events(EVENTS)(draw)))

        every = config.checkpoint_every_steps
        save = Hook(every, lambda progress: self.save(), requested=lambda: control.save_due or best.improved)
        return [*hooks, save]
