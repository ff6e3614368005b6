"""Trains by this package what a script trains by `keras.Model.fit`: each call is a part of one run.

The checkpoints of all parts lie in one folder, numbered by the steps of the run. The same command
again runs the script from its start: a finished part sets the weights, the optimizer and the
callbacks that it left, and trains nothing; the interrupted one goes on.
"""

import hashlib
import inspect
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.callbacks import CallbackList, History

from trainer.base.errors import DONE, INTERRUPTED, UserError, reason
from trainer.base.log import hidden, log, set_verbose, warn_once
from trainer.base.run_files.goodput import START
from trainer.base.run_files.job_directory import JobDir
from trainer.base.run_files.job_files import items
from trainer.base.script import calls_fit
from trainer.base.settings.fields import flag_name
from trainer.base.settings.request import LAUNCH_SETTINGS
from trainer.base.settings.step_counts import Schedule
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import Replicas, local_devices
from trainer.data.fingerprint import content_of
from trainer.data.fit_data import FitBatches, data_of_fit
from trainer.measures.keras_calls import answered_by_replicas
from trainer.models.construction import adapt_keras, prepare_model
from trainer.reporting.result import refuse_hopeless_restart
from trainer.run.job import (
    act_on_check,
    export_model,
    finish,
    restored_run,
    train_to_end,
    write_run_info,
)
from trainer.run.replica_check import act_on_verdict, judge_built, needs_check
from trainer.run.start import StartedJob
from trainer.run.training_run import TrainingRun
from trainer.run.training_setup import (
    TrainingSetup,
    refuse_other_classes,
    set_arithmetic,
    set_precision,
)
from trainer.training.callbacks import usable
from trainer.training.checkpoint import Checkpoints
from trainer.training.loop import Control
from trainer.training.signals import StopRequest, leave_on_signals, stop_on_interrupt

_FIT = inspect.signature(keras.Model.fit)


def launch(
    config: TrainConfig,
    command: Sequence[str],
    began: float,
    job_dir: JobDir,
    arguments: Sequence[str],
    *,
    forced: bool = False,
) -> int:
    """Runs the script `config.model` with its `arguments`; its calls of `fit` are a run.

    Returns the exit code.
    began: time.monotonic() at the start of the process; forced: even if no call of `fit` is seen in
        its source. Raises UserError for what the user must change.
    """
    # A script that never calls `fit` gets nothing from a run, and is left alone.
    script = Path(config.model)
    if not (forced or calls_fit(script.parent, script.name)):
        log.info(
            f"{config.model} calls no fit of Keras: it runs as it is, on the devices that it"
            " chooses itself (--launch trains by this package)"
        )
        run_script(config.model, arguments)
        return DONE

    # Only the chief may write to a bucket, and another worker's file is warned of.
    with opened_run(config, command, began, job_dir) as run:
        run.job.code = hashlib.sha256(script.read_bytes()).hexdigest()[:16]
        if not run.job.cluster.is_chief:
            sys.addaudithook(warn_of_shared_file)
        run.run_script(run.fit, arguments)
        return run.end()


def prove_script(config: TrainConfig, arguments: Sequence[str]) -> None:
    """Runs a script up to its first call of `fit`, and logs what is proved of that call's step.

    Raises UserError for what replicas that are paid for should not train.
    """
    with opened_run(config, ["trainer.launch"], time.monotonic(), None) as run:
        run.run_script(run.prove, arguments)


def fit_model(model: keras.Model, config: TrainConfig, arguments: Mapping[str, Any]) -> None:
    """Trains a compiled model of this process by the arguments of `keras.Model.fit`.

    On several replicas a copy that Keras makes of its config is trained, and gives its weights
    back. Raises UserError for what the user must change, and KeyboardInterrupt after Ctrl-C, when
    the state is saved.
    """
    with opened_run(config, ["vertex_trainer.fit"], time.monotonic(), None) as run:
        run.stopping = stop_on_interrupt
        trained = model
        if run.replicas.count > 1:
            with run.replicas.strategy.scope():
                trained = copy_of(model)
        with suppress(Ended):
            run.fit(trained, **arguments)
        if trained is not model:
            set_state(model, trained)
        if run.end() == INTERRUPTED:
            raise KeyboardInterrupt("the state is saved: the same call resumes")


def copy_of(model: keras.Model) -> keras.Model:
    """Returns a compiled copy of a model, with its weights and its optimizer's state.

    Keras makes it of the model's config. Raises UserError for a model that Keras cannot make again.
    """
    try:
        copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(model))
    except Exception as error:
        raise UserError(
            f"model={type(model).__name__}: several replicas train a copy, which Keras cannot make"
            f" of its config ({reason(error)}): give the class a get_config, take replicas=1, or"
            " train by a script (trainer.launch)"
        ) from error
    set_state(copy, model)
    return copy


def set_state(model: keras.Model, source: keras.Model) -> None:
    """Gives a model the weights of another with the same config, and its optimizer's state."""
    if source.built and not model.built:
        model.build_from_config(source.get_build_config())
    model.set_weights(source.get_weights())
    if source.optimizer and source.optimizer.built:
        model.optimizer.build(model.trainable_variables)
        for variable, value in zip(
            model.optimizer.variables, source.optimizer.variables, strict=True
        ):
            variable.assign(value)


@contextmanager
def opened_run(
    config: TrainConfig, command: Sequence[str], began: float, job_dir: JobDir | None
) -> Iterator["Launch"]:
    """Opens the run whose parts are calls of `fit`, and closes it after the block.

    Its workers and replicas are connected before the block.
    began: time.monotonic() at the start of the process.
    """
    job = StartedJob.open(config, command, began, job_dir)
    # A worker that waits for another in TensorFlow's own code does not see a signal.
    signals = leave_on_signals() if job.cluster.several else nullcontext()
    with closing(job.job_dir.mirror), signals, job.tracking, job.workers():
        refuse_hopeless_restart(config, job.result.before)
        _ = job.earlier  # read before this start writes it
        job.result.goodput.enter(START)
        # Any batch that can be divided connects the replicas: each call of fit brings its own.
        shares = config.virtual_replicas or len(local_devices(config, job.cluster))
        batch = config.micro_batches * shares * job.cluster.workers
        connecting = replace(job, config=replace(config, global_batch_size=batch))
        replicas = connecting.connect(has_batch=False)
        set_arithmetic(config)
        if config.precision != TrainConfig.precision:  # else the user's code may set its own
            set_precision(config)
        adapt_keras()
        yield Launch(job, replicas)


@contextmanager
def fixed_strategy(strategy: Any, config: TrainConfig) -> Iterator[None]:
    """Replaces, in the block, each strategy that a script makes by this one.

    Settings of devices come too late and do nothing. clear_session forgets neither the scope nor
    `config.precision`.
    """

    def cleared() -> None:
        if config.precision != TrainConfig.precision:
            set_precision(config)

    # Keras also asks whether the launcher's strategy is an instance of these classes.
    class Replaced(type):
        """Is the type of a class whose instances are all this strategy."""

        def __call__(cls, *arguments: Any, **named: Any) -> Any:
            name = cls.__name__
            log.info(
                f"tf.distribute.{name}: the devices are those of trainer.launch: see --replicas"
            )
            return strategy

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, cls.__bases__)

    def too_late(name: str) -> Callable[..., None]:
        return lambda *arguments, **named: log.info(
            f"{name}: has no effect, as TensorFlow runs already"
        )

    with ExitStack() as stack:
        for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy"):
            replaced = Replaced(name, (getattr(tf.distribute, name),), {})
            stack.enter_context(mock.patch.object(tf.distribute, name, replaced))
        for holder, name in (
            (tf.config, "set_visible_devices"),
            (tf.config, "set_logical_device_configuration"),
            (tf.config.experimental, "set_memory_growth"),
            (tf.config.threading, "set_inter_op_parallelism_threads"),
            (tf.config.threading, "set_intra_op_parallelism_threads"),
        ):
            stack.enter_context(mock.patch.object(holder, name, too_late(name)))
        # TensorFlow keeps the scope with the graph that Keras's clear_session replaces by this.
        stack.enter_context(mock.patch.object(tf.compat.v1, "reset_default_graph", cleared))
        yield


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a script as `python SCRIPT ARGUMENTS` does.

    Raises UserError if it ends with an exit code of its own.
    """
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            line = f"{script} ended by sys.exit({error.code!r})"
            ours = [word for word in arguments if flag_name(word) in LAUNCH_SETTINGS]
            if ours:
                flag = ours[0].partition("=")[0]
                line += f": {flag} is a flag of trainer.launch: write it before {script}"
            raise UserError(line) from error


def warn_of_shared_file(event: str, arguments: Sequence[Any]) -> None:
    """Warns once of each file in a bucket that a worker opens to write it.

    It is a hook of Python's audit events, on workers other than the chief.
    """
    if event != "open":
        return
    path, _, flags = arguments
    if str(path).startswith("/gcs/") and flags & (os.O_WRONLY | os.O_RDWR):
        warn_once(
            f"{path}: each worker writes it, and the last one stays: write it where the task in"
            " TF_CONFIG is the chief"
        )


class Ended(BaseException):
    """Ends the script: a signal or a limit has ended training, and the state is saved."""


@dataclass
class Launch:
    """Holds the run of a script, and what its calls of `fit` have trained so far."""

    job: StartedJob
    replicas: Replicas
    # what each call of `fit` trains on, as run.json has it
    parts: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0  # of all parts so far
    ends: list[int] = field(default_factory=list)  # the number of steps after each part
    run: TrainingRun | None = None  # the newest part
    called: bool = False  # whether the script has called `fit`
    control: Control | None = None  # of the newest call; None if it has not trained to its end
    # each with the key by which a later call finds it
    setups: list[tuple[Any, TrainingSetup]] = field(default_factory=list)
    stopping: Callable[[], AbstractContextManager[StopRequest]] | None = None  # see `train_to_end`

    def run_script(self, fit: Callable[..., Any], arguments: Sequence[str]) -> None:
        """Runs the script with its `arguments`, in which Keras's `fit` is this one, until it ends
        or Ended is raised."""
        keras.utils.set_random_seed(self.job.config.seed)  # a script that seeds itself wins
        strategy = self.replicas.strategy
        answered = answered_by_replicas(self.replicas, fit=fit)
        fixed = fixed_strategy(strategy, self.job.config)
        with answered, strategy.scope(), fixed, suppress(Ended):
            run_script(self.job.config.model, arguments)

    def prove(self, *arguments: Any, **named: Any) -> None:
        """Logs what is proved of the step of a call of `fit`, and ends the script.

        Raises UserError for what replicas that are paid for should not train.
        """
        setup = self._setup(_call(arguments, named))
        verdict = judge_built(setup)
        set_verbose(False)  # shows this line, after those of the start were hidden
        allowed = setup.config.allow_replica_dependence or verdict.fault
        act_on_verdict(verdict, allowed=allowed, paid=True)
        raise Ended

    def fit(self, *arguments: Any, **named: Any) -> History:
        """Does what `keras.Model.fit` does with these arguments, and returns its History.

        Raises UserError for what cannot be trained on, and Ended when a signal or a limit ends the
        run.
        """
        self.called = True
        self.control = None
        call = _call(arguments, named)
        setup = self._setup(call)
        callbacks = call["callbacks"] or []
        if isinstance(callbacks, CallbackList):
            callbacks = callbacks.callbacks
        if not isinstance(callbacks, (list, tuple)):
            callbacks = [callbacks]

        # Goes on from this call's newest checkpoint, and records the call in run.json.
        first_step = call["initial_epoch"] * setup.schedule.steps_per_epoch
        checkpoints = self._checkpoints(setup, first_step)
        job = replace(self.job, config=setup.config)
        run = restored_run(job, setup, usable(callbacks), checkpoints, first_step, self.steps)
        run.validation_freq = call["validation_freq"]
        run.rehearses = self.run is None
        if self.job.cluster.is_chief:
            if self.run is None:
                write_run_info(run, self.job.config)
            self.job.job_dir.add_to_run_info(
                parts=self.parts, total_steps=self.steps + run.state.progress.total_steps
            )
        if self.run is None:
            self.job.tracking.begin()
        # A run that began on one replica has no proof, though it has saved a state.
        checked = "replica_check" in self.job.earlier
        if setup.proves and not (run.state.saved and self.replicas.from_worker(checked)):
            # Each worker traces: tracing numbers the sums over workers, and all must have the same
            # numbers after it.
            verdict = judge_built(setup)
            if self.job.cluster.is_chief:
                act_on_check(run, verdict)

        # Trains, or only restores what the call trained in an earlier start.
        self.run = run
        with hidden(call["verbose"] == 0), closing(run.state.reporter):
            run.state.reporter.begin(repeats_step=run.state.pending)
            self.control = train_to_end(run, self.stopping)
        if self.control:
            raise Ended

        # The script goes on, with the History that Keras's `fit` would return.
        self.steps += run.state.progress.step
        self.ends.append(self.steps)
        history = run.state.history
        epochs = len(next(iter(history.history.values()), []))
        history.epoch = [*range(call["initial_epoch"], call["initial_epoch"] + epochs)]
        return history

    def _setup(self, call: dict[str, Any]) -> TrainingSetup:
        """Returns the model, its data and their order for a call of `fit`.

        A second call for the same compiled model and batches of the same kind has its traced steps.
        """
        model = call["self"]
        if not model.compiled:
            raise UserError(
                "fit: the model is not compiled: call model.compile(optimizer, loss=…) first"
            )

        # Reads the data of the call, as `fit` would.
        epochs = call["epochs"]
        epoch_steps = call["steps_per_epoch"] or 0
        if call["shuffle"] == "batch":
            raise UserError(
                "fit: shuffle='batch' is for HDF5 files: use shuffle=True, or a tf.data.Dataset"
            )
        data = data_of_fit(
            call["x"],
            call["y"],
            call["sample_weight"],
            batch_size=call["batch_size"],
            shuffles=bool(call["shuffle"]),
            validation_data=call["validation_data"],
            validation_split=call["validation_split"],
            validation_batch_size=call["validation_batch_size"],
            validation_steps=call["validation_steps"],
            steps=epoch_steps * epochs,
            seed=self.job.config.seed,
        )
        weights = call["class_weight"] or {}
        config = replace(
            self.job.config,
            global_batch_size=data.batch_size,
            epochs=epochs,
            class_weight={int(number): float(weights[number]) for number in weights},
            evaluation_batch_size=data.validation_batch_size,
        )

        # Divides the data into batches and epochs.
        train = data.dataset.train
        if data.last and (config.virtual_replicas or config.micro_batches > 1):
            raise UserError(
                f"fit: the last batch of a pass has {data.last} rows, which --virtual_replicas and"
                f" --micro_batches cannot divide: use a batch_size that divides {data.rows}"
            )
        if epoch_steps and data.steps % min(epoch_steps, data.steps):
            raise UserError(
                f"fit: steps_per_epoch={epoch_steps} does not divide the {data.steps} batches of a"
                " pass, so that some epochs would end early: use a divisor, or repeat() of a"
                " tf.data.Dataset"
            )
        schedule = Schedule(
            data.rows,
            data.batch_size,
            1,
            config.seed,
            last=data.last,
            epoch_steps=min(epoch_steps or data.steps, data.steps),
        )

        # Divides each batch into the rows of replicas.
        count = self.replicas.count
        try:
            rows = config.rows_per_replica(count)
        except UserError as error:
            raise UserError(f"fit: {error}".replace("global_batch_size", "batch_size")) from None
        replicas = replace(
            self.replicas,
            rows=rows,
            global_batch_size=data.batch_size,
            micro_batches=config.micro_batches_on(count),
        )
        content = content_of(data.dataset, rows=True)
        replicas.refuse_differences(content, "read the same data")

        # A call like an earlier one takes over its traced steps.
        kind = (
            id(model),
            id(model.optimizer),
            replicas,
            data.last,
            str(train.spec),
            type(train),
            config.class_weight,
        )
        known = next((setup for other, setup in self.setups if other == kind), None)
        if known:
            return replace(
                known,
                config=config,
                dataset=data.dataset,
                schedule=schedule,
                content=content,
                proves=False,
            )

        # A new call prepares the model.
        with replicas.strategy.scope():
            prepare_model(model, config, data.dataset)
        refuse_other_classes(config, data.dataset, model)
        if data.last and isinstance(getattr(model, "loss", None), (list, tuple, dict)):
            log.info(
                "the loss of each output is a mean over rows, in Keras's fit over batches, of which"
                " the last is smaller"
            )
        proves = needs_check(config, count)
        setup = TrainingSetup(
            config, replicas, data.dataset, model, schedule, content, (), proves=proves
        )
        self.setups.append((kind, setup))
        log.info(replicas.sentence())
        return setup

    def _checkpoints(self, setup: TrainingSetup, first_step: int) -> Checkpoints:
        """Returns the checkpoints of a part, without those of a call that was another."""
        number = len(self.parts)
        self.parts.append(_described(setup, first_step))
        job_dir = self.job.job_dir
        before = self.steps
        total = setup.schedule.total_steps(None, setup.config.epochs)
        checkpoints = Checkpoints(
            setup.model,
            setup.replicas,
            job_dir.checkpoints,
            setup.config.keep_checkpoints,
            job_dir.mirror,
            steps=range(before + bool(before), before + total + 1),
            ends=self.ends,
        )

        # Compares the call with the one of the same number in run.json.
        earlier = [*items(self.job.earlier, "parts")]
        now = json.loads(json.dumps(self.parts[number]))
        recorded = earlier[number] if number < len(earlier) else now
        changes = [name for name in now if recorded.get(name) != now[name]]
        if changes == ["epochs"] and number == len(earlier) - 1:
            changes = []  # the last call may become longer
        piped = isinstance(setup.dataset.train, FitBatches)
        if changes == ["data"] and piped and job_dir.mirror.holds(job_dir.checkpoints):
            raise UserError(
                f"call {number + 1} of fit: its first batches are others than when this run began:"
                " give what shuffles or draws a seed, restore the data, or use another --job_dir"
            )
        if changes:
            log.warning(
                f"call {number + 1} of fit is another one than when this run began"
                f" ({', '.join(changes)}): training starts anew from there and replaces what"
                f" {setup.config.job_dir} has of it (another --job_dir would keep it)"
            )
            if self.job.cluster.is_chief:
                checkpoints.remove_after(before)
        return checkpoints

    def end(self) -> int:
        """Exports the last model, writes result.json, and returns the exit code.

        Raises UserError if the last call of `fit` failed.
        """
        if not self.called:
            log.warning("the script never called fit: nothing was trained by this package")
            return DONE
        if not self.run or self.control is None:
            raise UserError(
                "the last call of fit failed, and the script caught the error: nothing is exported;"
                " let it end the script, or call fit again"
            )
        if not self.control.signal:
            export_model(self.run)
        return finish(self.run, self.control)


def _call(arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of `fit` by their names, with Keras's defaults."""
    bound = _FIT.bind(*arguments, **named)
    bound.apply_defaults()
    return bound.arguments


def _described(setup: TrainingSetup, first_step: int) -> dict[str, Any]:
    """Returns what tells a call of `fit` from another one, in JSON types."""
    model = setup.model
    schedule = setup.schedule
    weights = [(list(weight.shape), bool(weight.trainable)) for weight in model.weights]
    structure = json.dumps([type(model).__name__, weights])
    return {
        "model": hashlib.sha256(structure.encode()).hexdigest()[:16],
        "data": setup.content,
        "batch_size": schedule.global_batch_size,
        "steps_per_epoch": schedule.steps_per_epoch,
        "first_step": first_step,
        "epochs": setup.config.epochs,
    }
