"""Trains one run from its restored state to its last step, and saves its state."""

import copy
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import keras

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.base.run_files.breakdown import tried_by
from trainer.base.run_files.job_directory import JobDir
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.meeting import Peers
from trainer.data.sources import beside_data
from trainer.measures.evaluation import Evaluation, evaluation
from trainer.measures.fid import make_fid
from trainer.measures.profiling import StepProfile
from trainer.reporting.progress import Progress, StepLogs
from trainer.reporting.reporter import Reporter
from trainer.reporting.result import RunResult
from trainer.run.build import TrainingSetup
from trainer.run.hooks import Best, make_hooks
from trainer.run.rehearsal import has_own_parts, rehearse
from trainer.training.callbacks import bind, restore_callbacks, state_of_callbacks
from trainer.training.checkpoint import Checkpoints, has_pending_hooks
from trainer.training.compilation import Choice, TimedSteps, choose
from trainer.training.loop import CallSize, Hook, run_due_hooks, train
from trainer.training.preemption import Control, Interrupted, StopRequest
from trainer.training.state import LearningRates
from trainer.training.steps import StepRunner
from trainer.user_code.interface import ModelInterface


@dataclass
class TrainingRun:
    """Holds the parts of one run, ready to train."""

    config: TrainConfig
    job_dir: JobDir
    result: RunResult
    peers: Peers | None
    setup: TrainingSetup
    callbacks: list[keras.callbacks.Callback]
    rates: LearningRates
    checkpoints: Checkpoints
    progress: Progress
    restored: dict[str, Any]  # the state beside the variables that the run resumes from; {} for a new run
    best: Best
    choice: Choice | None = None  # of plain or compiled steps, made before this run was resumed
    before_hooks: dict[str, Any] = field(default_factory=dict)  # the state that a signal during the hooks saves

    @property
    def is_chief(self) -> bool:
        """Returns whether this worker writes the files."""
        return self.setup.replicas.cluster.is_chief

    @property
    def pending(self) -> bool:
        """Returns whether the hooks of the restored step must still run, because a signal came first."""
        return has_pending_hooks(self.restored)

    def state(self, reporter: Reporter, *, pending: bool = False) -> dict[str, Any]:
        """Returns what a checkpoint stores beside the variables; `pending`: the hooks of this step have not run."""
        return {
            **self.progress.state(),
            "reporter": reporter.state(),
            "callbacks": state_of_callbacks(self.callbacks),
            "learning_rates": self.rates.state(),
            "best": self.best.state(),
            "pending": pending,
        }

    def save(self, reporter: Reporter, *, pending: bool = False) -> None:
        """Saves the current step; with `pending`, the state before this step's hooks ran. Then updates result.json."""
        self.best.improved = False
        self.checkpoints.save(self.progress.step, self.before_hooks if pending else self.state(reporter))
        self.write_result("running", reporter)

    def write_result(self, state: str, reporter: Reporter) -> None:
        """Replaces result.json, on the chief."""
        if self.is_chief:
            self.result.saving_seconds = self.checkpoints.saving_seconds
            self.job_dir.write_result({**self.result.result(state), **reporter.summary()})

    def train(self, reporter: Reporter, stop: StopRequest) -> Control:
        """Trains until the last step, or until a signal, the budget or a callback stops it."""
        config, model, progress, minutes = self.config, self.setup.model, self.progress, self.config.max_minutes
        save_every = 60 * config.checkpoint_every_minutes if config.checkpoint_every_minutes else None
        budget = 60 * minutes - self.result.wall_seconds if minutes else None
        control = Control(self.setup.replicas, stop, save_every, budget)
        evaluate = evaluation(model, control.watched(), self.setup.dataset, config.evaluation_batch)
        if has_own_parts(config) and self.is_chief and not self.restored:
            rehearse(self.setup, evaluate)
        callbacks = bind(self.callbacks, model, progress, evaluate.names if evaluate else ())
        model.stop_training = False
        callbacks.on_train_begin()
        if self.restored:
            with readable_state(self.checkpoints):
                reporter.resume(self.restored["reporter"])
                restore_callbacks(self.callbacks, self.restored["callbacks"])
                self.rates.resume(self.restored.get("learning_rates") or self.rates.state())
        callbacks.on_epoch_begin((progress.step - self.pending) // progress.steps_per_epoch)
        hooks = self._hooks(reporter, callbacks, evaluate, control)
        if self.pending:
            run_due_hooks(hooks, progress, model)
        steps = self.setup.step_runner()
        if not (progress.ends or control):
            log.info("builds the training step: seconds, or minutes for a large model with several replicas")
            steps = self._chosen_steps(reporter, stop, control)
        rows, profile = self.setup.rows_from(progress.step), self._profile(reporter)

        def begin() -> None:
            if self.peers:
                self.peers.begin_call()
            profile.before_call()

        def on_call(progress: Progress, logs: StepLogs) -> None:
            profile.after_call()
            reporter.on_call(progress, logs)

        with closing(profile):
            hooks, size = [*hooks, profile.cuts], CallSize(config.steps_per_loop)
            train(steps, rows, progress, hooks, callbacks, on_call, size, control, begin)
        callbacks.on_train_end()
        return control

    def _chosen_steps(self, reporter: Reporter, stop: StopRequest, control: Control) -> StepRunner:
        """Returns the runner of plain or of compiled steps, once run.json holds the choice."""
        setup, step = self.setup, self.progress.step
        trial = TimedSteps(
            setup.model,
            setup.replicas,
            lambda compiled: setup.step_runner(compiled=compiled),
            lambda: setup.rows_from(step),
            step,
            control.watched().before_sum,
        )
        self.before_hooks = copy.deepcopy(self.state(reporter))  # what a signal saves now
        stop.nothing_to_save = True
        try:
            self.choice = choose(self.config, trial, self.progress.total_steps - step, self.choice)
        except Interrupted:
            return trial.runner(False)  # which will not run: the next start chooses again
        finally:
            stop.nothing_to_save = False
        if self.is_chief:
            self.job_dir.add_to_run_info(compilation=asdict(self.choice))
        return trial.runner(self.choice.compiled)

    def _profile(self, reporter: Reporter) -> StepProfile:
        """Returns the profile of the chosen steps; only the chief writes one."""
        choice = asdict(self.choice) if self.choice else {}
        report = partial(reporter.profiled, tried=tried_by(asdict(self.config), choice))
        compiled = choice.get("compiled") or ModelInterface.of(self.setup.model).compiles_gradients
        logs = self.job_dir.logs if self.is_chief else None
        return StepProfile(self.config.profiled, logs, self.progress, report, bool(compiled))

    def _hooks(
        self, reporter: Reporter, callbacks: keras.callbacks.CallbackList, evaluate: Evaluation | None, control: Control
    ) -> list[Hook]:
        """Returns all hooks: the first copies the state for a signal to save, so that all others run on resume."""

        def begin(progress: Progress) -> None:
            self.before_hooks = copy.deepcopy(self.state(reporter, pending=True))
            if control.signal:
                raise Interrupted

        config, setup, fid = self.config, self.setup, None
        if config.fid_every_steps:
            folder, data = beside_data(config.data, self.job_dir.root), setup.dataset
            fid = make_fid(config, setup.model, data.images("train"), control.watched(), folder)
        epoch = setup.schedule.steps_per_epoch
        others = make_hooks(config, setup.model, epoch, reporter, callbacks, evaluate, fid, self.best, control)
        save = Hook(
            config.checkpoint_every_steps,
            lambda progress: self.save(reporter),
            requested=lambda: control.save_due or self.best.improved,
        )
        return [Hook(0, begin, requested=lambda: True), *others, save]


@contextmanager
def readable_state(checkpoints: Checkpoints) -> Iterator[None]:
    """Raises UserError if the state beside the variables is not what this version stores."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{checkpoints.restored}: its state is of another version of this trainer ({error!r}): use that version, "
            "or another --job_dir"
        ) from error
