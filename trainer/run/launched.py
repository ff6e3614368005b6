"""Trains by this package what a script trains by `keras.Model.fit`: each call is a part of one run.

The checkpoints of all parts lie in one folder, numbered by the steps of the run. The same command again runs the script
from its start: a finished part sets the weights, the optimizer and the callbacks that it left, and trains nothing; the
interrupted one goes on.
"""

import hashlib
import inspect
import json
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.callbacks import CallbackList, History

from trainer.base.errors import DONE, UserError
from trainer.base.log import log
from trainer.base.run_files.goodput import START
from trainer.base.run_files.job_directory import JobDir
from trainer.base.run_files.job_files import items
from trainer.base.script import calls_fit
from trainer.base.settings.schedule import Schedule
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import Replicas, local_devices
from trainer.data.dataset import Dataset
from trainer.data.fingerprint import content_of
from trainer.data.fit_data import data_of_fit, examples_of_fit
from trainer.invariance.internals import outside_of_scopes, wrapped
from trainer.measures.evaluation import Evaluation
from trainer.measures.prediction import predict
from trainer.models.construction import adapt_keras, prepare_model
from trainer.reporting.result import refuse_hopeless_restart
from trainer.run.job import act_on_check, export_model, finish, restored_run, train_to_end, write_run_info
from trainer.run.replica_check import judge_built, needs_check
from trainer.run.start import StartedJob
from trainer.run.training_run import TrainingRun
from trainer.run.training_setup import TrainingSetup, refuse_other_classes, set_arithmetic, set_precision
from trainer.training.callbacks import usable
from trainer.training.checkpoint import Checkpoints
from trainer.training.loop import Control
from trainer.training.signals import leave_on_signals

_FIT, _EVALUATE, _PREDICT = map(inspect.signature, (keras.Model.fit, keras.Model.evaluate, keras.Model.predict))


def launch(
    config: TrainConfig, command: Sequence[str], began: float, job_dir: JobDir, arguments: Sequence[str], *,
    forced: bool = False,
) -> int:  # fmt: skip
    """Runs the script `config.model` with its `arguments`; its calls of `fit` are a run. Returns the exit code.

    began: time.monotonic() at the start of the process; forced: even if no call of `fit` is seen in its source. Raises
    UserError for what the user must change.
    """
    script = Path(config.model)
    if not (forced or calls_fit(script.parent, script.name)):
        log.info(
            f"{config.model} calls no fit of Keras: it runs as it is, on the devices that it chooses itself (--launch "
            "trains by this package)"
        )
        run_script(config.model, arguments)
        return DONE
    job = StartedJob.open(config, command, began, job_dir)
    job.code = hashlib.sha256(Path(config.model).read_bytes()).hexdigest()[:16]
    signals = leave_on_signals() if job.cluster.several else nullcontext()
    with closing(job.job_dir.mirror), signals, job.tracking, job.workers():
        refuse_hopeless_restart(config, job.result.before)
        _ = job.earlier  # read before this start writes it
        job.result.goodput.enter(START)
        batch = config.micro_batches * (config.virtual_replicas or len(local_devices(config, job.cluster)))
        replicas = replace(job, config=replace(config, global_batch_size=batch * job.cluster.workers)).connect()
        set_arithmetic(config)
        if config.precision != TrainConfig.precision:  # else the script may set its own
            set_precision(config)
        keras.utils.set_random_seed(config.seed)  # a script that seeds itself wins
        adapt_keras()
        launched = Launch(job, replicas)
        with launched.replacing_fit(), replicas.strategy.scope(), one_strategy(replicas.strategy), suppress(Ended):
            run_script(config.model, arguments)
        return launched.end()


@contextmanager
def one_strategy(strategy: Any) -> Iterator[None]:
    """Makes strategies that a script makes in the block this one; settings of devices come too late and do nothing."""

    def same(name: str) -> Callable[..., Any]:
        def make(*given: Any, **named: Any) -> Any:
            log.info(f"tf.distribute.{name}: the devices are those of trainer.launch: see --replicas")
            return strategy

        return make

    def too_late(name: str) -> Callable[..., None]:
        return lambda *given, **named: log.info(f"{name}: has no effect, as TensorFlow runs already")

    with ExitStack() as stack:
        for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy"):
            stack.enter_context(mock.patch.object(tf.distribute, name, same(name)))
        for holder, name in (
            (tf.config, "set_visible_devices"),
            (tf.config, "set_logical_device_configuration"),
            (tf.config.experimental, "set_memory_growth"),
            (tf.config.threading, "set_inter_op_parallelism_threads"),
            (tf.config.threading, "set_intra_op_parallelism_threads"),
        ):
            stack.enter_context(mock.patch.object(holder, name, too_late(name)))
        yield


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a script as `python SCRIPT ARGUMENTS` does. Raises UserError if it ends with an exit code of its own."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise UserError(f"{script} ended by sys.exit({error.code!r})") from error


class Ended(BaseException):
    """Ends the script: a signal or a limit has ended training, and the state is saved."""


@dataclass
class Launch:
    """Holds the run of a script, and what its calls of `fit` have trained so far."""

    job: StartedJob
    replicas: Replicas
    parts: list[dict[str, Any]] = field(default_factory=list)  # of run.json: what each call of `fit` was asked for
    steps: int = 0  # of all parts so far
    ends: list[int] = field(default_factory=list)  # the number of steps after each part
    run: TrainingRun | None = None  # the newest part
    control: Control | None = None  # of the newest part
    setups: list[tuple[Any, TrainingSetup]] = field(default_factory=list)  # each with what tells it from others

    @contextmanager
    def replacing_fit(self) -> Iterator[None]:
        """Makes `fit`, `evaluate` and `predict` of all Keras models in the block those of this package."""

        def outside(method: Callable[..., Any], original: Any, *given: Any, **named: Any) -> Any:
            with outside_of_scopes():
                return method(*given, **named)

        methods = {"fit": self.fit, "evaluate": self.evaluate, "predict": self.predict}
        with ExitStack() as stack:
            for name, method in methods.items():
                stack.enter_context(wrapped(f"keras.Model.{name}", partial(outside, method)))
            yield

    def fit(self, *given: Any, **named: Any) -> History:
        """Does what `keras.Model.fit` does with these arguments, and returns its History.

        Raises UserError for what cannot be trained on, and Ended when a signal or a limit ends the run.
        """
        bound = _FIT.bind(*given, **named)
        bound.apply_defaults()
        call = bound.arguments
        setup = self._setup(call["self"], call)
        callbacks = call["callbacks"]
        if isinstance(callbacks, CallbackList):
            callbacks = callbacks.callbacks
        kept = usable(callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else [])
        first_step = call["initial_epoch"] * setup.schedule.steps_per_epoch
        checkpoints = self._checkpoints(setup, first_step)
        job = replace(self.job, config=setup.config)
        run = restored_run(job, setup, kept, checkpoints, first_step, self.steps)
        run.validation_freq = call["validation_freq"]
        run.rehearses = self.run is None
        if self.job.cluster.is_chief:
            if self.run is None:
                write_run_info(run, self.job.config)
            self.job.job_dir.add_to_run_info(parts=self.parts, total_steps=self.steps + run.state.progress.total_steps)
        if self.run is None:
            self.job.tracking.begin()
        if setup.proves and not run.state.saved:
            # On each worker: TensorFlow numbers the operations between them in the order in which they are traced.
            verdict = judge_built(setup.config, setup.dataset, setup.model)
            if self.job.cluster.is_chief:
                act_on_check(run, verdict)
        self.run = run
        with _quiet(call["verbose"] == 0), closing(run.state.reporter):
            run.state.reporter.begin(repeats_step=run.state.pending)
            self.control = train_to_end(run)
        if self.control:
            raise Ended
        self.steps += run.state.progress.step
        self.ends.append(self.steps)
        history = run.state.history
        epochs = len(next(iter(history.history.values()), []))
        history.epoch = [*range(call["initial_epoch"], call["initial_epoch"] + epochs)]
        return history

    def _setup(self, model: keras.Model, call: dict[str, Any]) -> TrainingSetup:
        """Returns the model, its data and their order for a call of `fit`.

        A second call for the same compiled model and batches of the same kind has its traced steps.
        """
        epochs, epoch_steps = call["epochs"], call["steps_per_epoch"] or 0
        if call["shuffle"] == "batch":
            raise UserError("fit: shuffle='batch' is for HDF5 files: use shuffle=True, or a tf.data.Dataset")
        data = data_of_fit(
            call["x"], call["y"], call["sample_weight"],
            batch_size=call["batch_size"],
            shuffles=bool(call["shuffle"]),
            validation_data=call["validation_data"],
            validation_split=call["validation_split"],
            validation_batch_size=call["validation_batch_size"],
            validation_steps=call["validation_steps"],
            steps=epoch_steps * epochs,
            seed=self.job.config.seed,
        )  # fmt: skip
        config = replace(
            self.job.config,
            global_batch_size=data.batch_size,
            epochs=epochs,
            class_weight={int(number): float(weight) for number, weight in (call["class_weight"] or {}).items()},
            evaluation_batch_size=data.validation_batch_size,
        )
        train = data.dataset.train
        if data.last and (config.virtual_replicas or config.micro_batches > 1):
            raise UserError(
                f"fit: the last batch of a pass has {data.last} rows, which --virtual_replicas and --micro_batches "
                f"cannot cut: use a batch_size that divides {train.count}"
            )
        schedule = Schedule(train.count, data.batch_size, 1, config.seed, last=data.last)
        if epoch_steps and schedule.steps_per_pass % min(epoch_steps, schedule.steps_per_pass):
            raise UserError(
                f"fit: steps_per_epoch={epoch_steps} does not divide the {schedule.steps_per_pass} batches of a pass, "
                "so that some epochs would end early: use a divisor, or repeat() of a tf.data.Dataset"
            )
        schedule = replace(schedule, epoch_steps=min(epoch_steps, schedule.steps_per_pass))
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
        content = content_of(data.dataset, rows=bool(train.arrays))
        replicas.refuse_differences(content, "read the same data")
        kind = (id(model), id(model.optimizer), replicas, data.last, str(train.spec), type(train), config.class_weight)
        known = next((setup for other, setup in self.setups if other == kind), None)
        if known:
            return replace(known, config=config, dataset=data.dataset, schedule=schedule, content=content, proves=False)
        with replicas.strategy.scope():
            prepare_model(model, config, data.dataset)
        refuse_other_classes(config, data.dataset, model)
        proves = needs_check(config, count)
        setup = TrainingSetup(config, replicas, data.dataset, model, schedule, content, (), proves=proves)
        self.setups.append((kind, setup))
        log.info(replicas.sentence())
        return setup

    def _checkpoints(self, setup: TrainingSetup, first_step: int) -> Checkpoints:
        """Returns the checkpoints of a part, without those of an earlier start that was asked for something else."""
        number = len(self.parts)
        self.parts.append(_described(setup, first_step))
        job_dir, before = self.job.job_dir, self.steps
        total = setup.schedule.total_steps(None, setup.config.epochs)
        checkpoints = Checkpoints(
            setup.model, setup.replicas, job_dir.checkpoints, setup.config.keep_checkpoints, job_dir.mirror,
            steps=range(before + bool(before), before + total + 1), ends=self.ends,
        )  # fmt: skip
        earlier = [*items(self.job.earlier, "parts")]
        if number < len(earlier) and earlier[number] != json.loads(json.dumps(self.parts[number])):
            now = self.parts[number]
            changes = [name for name in now if earlier[number].get(name) != now[name]]
            log.warning(
                f"call {number + 1} of fit is another one than when this run began ({', '.join(changes)}): training "
                "starts anew from there"
            )
            if self.job.cluster.is_chief:
                checkpoints.remove_after(before)
        return checkpoints

    def evaluate(self, *given: Any, **named: Any) -> Any:
        """Does what `keras.Model.evaluate` does with these arguments, over all replicas."""
        bound = _EVALUATE.bind(*given, **named)
        bound.apply_defaults()
        call = bound.arguments
        examples, size = examples_of_fit(
            "evaluate", call["x"], call["y"], call["sample_weight"], batch_size=call["batch_size"], steps=call["steps"]
        )
        as_fit = Dataset("evaluate", examples).as_fit
        values = Evaluation(call["self"], self.replicas, examples, size, as_fit)()
        results = {name.removeprefix("val_"): value for name, value in values.items()}
        if call.get("return_dict"):
            return results
        return [*results.values()] if len(results) > 1 else next(iter(results.values()))

    def predict(self, *given: Any, **named: Any) -> Any:
        """Does what `keras.Model.predict` does with these arguments, over all replicas."""
        bound = _PREDICT.bind(*given, **named)
        bound.apply_defaults()
        call, model = bound.arguments, bound.arguments["self"]
        examples, size = examples_of_fit("predict", call["x"], batch_size=call["batch_size"], steps=call["steps"])
        outputs = predict(model, self.replicas, examples, size, Dataset("predict", examples).as_fit)
        if isinstance(getattr(model, "output", None), dict):
            return outputs
        return [*outputs.values()] if len(outputs) > 1 else next(iter(outputs.values()))

    def end(self) -> int:
        """Exports the model that was trained last, writes result.json, and returns the exit code."""
        if not self.run or self.control is None:
            log.warning("the script never called fit: nothing was trained by this package")
            return DONE
        if not self.control.signal:
            export_model(self.run)
        return finish(self.run, self.control)


def _described(setup: TrainingSetup, first_step: int) -> dict[str, Any]:
    """Returns what tells a call of `fit` from another one, in JSON types."""
    model, schedule = setup.model, setup.schedule
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


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """Shows no progress in the block, only warnings."""
    before = log.level
    if quiet:
        log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)
