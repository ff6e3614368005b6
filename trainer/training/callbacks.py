"""Runs the user's Keras callbacks in this loop, with the arguments that `fit` gives them.

If a callback acts on single batches, each call to the device runs a single step.
"""

import inspect
import math
from collections.abc import Sequence
from importlib import import_module

import keras
from keras.callbacks import (
    BackupAndRestore,
    Callback,
    CallbackList,
    CSVLogger,
    LearningRateScheduler,
    ModelCheckpoint,
    OrbaxCheckpoint,
    ProgbarLogger,
    ReduceLROnPlateau,
    TensorBoard,
    TerminateOnNaN,
)

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.base.run_files.job_files import Scalars
from trainer.base.settings.rules import IMAGE_MEASURES, LOWER_IS_BETTER, check_known
from trainer.base.settings.train_config import TrainConfig
from trainer.invariance.internals import floats_of_variables
from trainer.reporting.progress import Progress, is_loss
from trainer.user_code.interface import ModelInterface
from trainer.user_code.mistakes import load_function


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Extends Keras's callback: it refuses a value that it cannot compare.

    These are a value that no epoch has, and one of which it is unknown whether higher is better. A
    loss should fall and an accuracy should rise; for any other value Keras looks up the model's
    metric of that name.
    """

    evaluated: Sequence[str] = ()  # the values of evaluation, which epochs have
    checked = False

    def __init__(self, monitor: str, patience: int) -> None:
        super().__init__(monitor=monitor, patience=patience, mode=_mode(monitor))
        self.best: float | None = None

    def on_train_batch_end(self, batch: int, logs: Scalars | None = None) -> None:
        """Raises UserError, after the first call, if epochs cannot be compared by `monitor`."""
        if not self.checked:
            names = {*(logs or {}), *self.evaluated}
            check_known("early_stopping", self.monitor, "an epoch has", names)
            higher_is_better(self.model, self.monitor, "early_stopping")
            self.checked = True

    def on_epoch_end(self, epoch: int, logs: Scalars | None = None) -> None:
        """Counts the epochs without improvement.

        NaN is none, although Keras takes any first value for the best.
        """
        if self.best is None:
            higher = higher_is_better(self.model, self.monitor, "early_stopping")
            self.best = -math.inf if higher else math.inf
        super().on_epoch_end(epoch, logs)


def _mode(monitor: str) -> str:
    """Returns Keras's mode: min, max, or auto where the model's metric of that name decides."""
    if is_loss(monitor) or monitor in LOWER_IS_BETTER:
        return "min"
    return "max" if "accuracy" in monitor or monitor in IMAGE_MEASURES else "auto"


def higher_is_better(model: keras.Model, monitor: str, setting: str, mode: str = "auto") -> bool:
    """Returns whether higher values of `monitor` are better.

    A loss should fall and an accuracy should rise; for any other value Keras looks up the model's
    metric of that name.
    mode: what a callback says of it: min, max or auto. Raises UserError, naming the setting, if it
        is unknown.
    """
    # Keras decides it at the end of a callback's first epoch, and this one compares two values.
    mode = _mode(monitor) if mode == "auto" else mode
    probe = keras.callbacks.EarlyStopping(monitor=monitor, mode=mode)
    probe.set_model(model)
    probe.on_train_begin()
    try:
        probe.on_epoch_end(0, {monitor: 0.0})
    except ValueError:
        raise UserError(
            f"{setting}={monitor}: it is unknown whether higher or lower is better: use a loss, an"
            " accuracy or a Keras metric"
        ) from None
    return bool(probe.monitor_op(1.0, 0.0))


def stop_reason(callbacks: Sequence[Callback]) -> str:
    """Returns which callback has ended a run by `model.stop_training`, as far as it says so."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.EarlyStopping) and callback.stopped_epoch:
            return (
                f"EarlyStopping: {callback.monitor} did not improve in {callback.patience} epochs"
            )
    return "a callback has set model.stop_training"


def load_callbacks(config: TrainConfig) -> list[Callback]:
    """Returns the callbacks of `config.callbacks`, and early stopping if it is set.

    Raises UserError if that function does not return a list of Keras callbacks.
    """
    path = config.callbacks
    callbacks = []
    if path:
        # The function is called with the settings if it has a parameter `config`.
        function = load_function(path, "callbacks", None, config)
        takes = "config" in inspect.signature(function).parameters
        function = load_function(path, "callbacks", ("config",) if takes else (), config)
        callbacks = function(config) if takes else function()
    is_list = isinstance(callbacks, list | tuple)
    if not is_list or not all(isinstance(item, Callback) for item in callbacks):
        raise UserError(
            f"callbacks={path}: it must return a list of keras.callbacks.Callback, not"
            f" {callbacks!r}"
        )
    loaded = usable(callbacks)
    if config.early_stopping:
        loaded.append(EarlyStopping(config.early_stopping, config.patience))
    return loaded


def usable(callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns the callbacks that can run here, and logs what is left out."""
    names = {type(item).__name__ for item in callbacks if _overrides(item, _TEST_HOOKS)}
    if unheard := sorted(names):
        log.info(
            f"callbacks: {', '.join(unheard)}: {' and '.join(_TEST_HOOKS)} are not called, as"
            " replicas evaluate batches in turn: use on_test_begin and on_test_end"
        )
    others = [callback for callback in callbacks if not isinstance(callback, BackupAndRestore)]
    if len(others) < len(callbacks):
        log.info(
            "callbacks: BackupAndRestore is left out, and its folder untouched: the run resumes"
            " from its own checkpoints, over which it would load older weights"
        )
    return others


def refuse_unevaluated(setting: str, value: str, evaluated: Sequence[str]) -> None:
    """Raises UserError if a setting names a value of evaluation that this run does not have."""
    if not evaluated:
        raise UserError(
            f"{setting}={value}: nothing is evaluated: use data with examples for evaluation, or "
            f"--evaluation_fraction=0.1, and a model with a loss, or drop {setting}"
        )
    check_known(setting, value, "evaluation gives", evaluated)


# These only write, at the place in this attribute: where workers share it, the chief alone runs
# them. A subclass may do more, and runs on each.
WRITERS = {
    CSVLogger: "filename",
    ModelCheckpoint: "filepath",
    OrbaxCheckpoint: "directory",
    TensorBoard: "log_dir",
}
_TEST_HOOKS = ("on_test_batch_begin", "on_test_batch_end")
_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
# Their hooks may run once in each call to the device, unless they count batches by save_freq or
# update_freq.
_ONCE_A_CALL = {
    EarlyStopping,
    Callback,
    ModelCheckpoint,
    OrbaxCheckpoint,
    ProgbarLogger,
    TensorBoard,
    TerminateOnNaN,
}


def acts_on_batches(callback: Callback) -> bool:
    """Returns whether a callback has a hook of single batches, also by its instance."""
    frequencies = [getattr(callback, name, None) for name in ("save_freq", "update_freq")]
    counts = any(isinstance(frequency, int) for frequency in frequencies)
    return counts or _overrides(callback, _BATCH_HOOKS)


def _overrides(callback: Callback, hooks: Sequence[str]) -> bool:
    """Returns whether a callback has one of the hooks, not of a class in _ONCE_A_CALL."""
    classes = type(callback).__mro__
    owners = {next(owner for owner in classes if name in vars(owner)) for name in hooks}
    return any(name in vars(callback) for name in hooks) or not owners <= _ONCE_A_CALL


def most_steps_of_a_call(
    callbacks: list[Callback], steps_per_loop: int, steps_per_execution: int = 1
) -> int:
    """Returns 1 if a callback acts on single batches, else `steps_per_loop` (0: no limit).

    Logs what that costs.
    steps_per_execution: that of compile(), by which `fit` runs such a callback less often.
    """
    names = sorted({type(callback).__name__ for callback in callbacks if acts_on_batches(callback)})
    if not names:
        return steps_per_loop
    if steps_per_loop != 1:
        log.info(
            f"callbacks: {', '.join(names)}: run after every step, so each call to the device runs"
            " one step: this costs a millisecond or more per step, which slows down small models"
        )
    if steps_per_execution > 1:
        log.warning(
            f"callbacks: {', '.join(names)}: `fit` would run after {steps_per_execution} steps"
            " (steps_per_execution)"
        )
    return 1


def callback_list(
    callbacks: list[Callback], model: keras.Model, progress: Progress, evaluated: Sequence[str]
) -> CallbackList:
    """Returns `callbacks`, set up as in `fit`.

    Raises UserError if one needs what this run does not have.
    """
    # A callback must find what it needs: an optimizer, a package, a value of evaluation.
    optimizer = ModelInterface.of(model).optimizer
    for callback in callbacks:
        if isinstance(callback, LearningRateScheduler | ReduceLROnPlateau) and optimizer is None:
            raise UserError(
                f"callbacks: {type(callback).__name__} changes model.optimizer, and this model is"
                " not compiled with one: use --learning_rate_schedule and --warmup_steps, or a"
                " callback that sets its optimizers"
            )
        if isinstance(callback, TensorBoard):
            try:
                import_module("tensorboard")
            except ImportError as error:
                raise UserError(
                    "callbacks: TensorBoard needs the package tensorboard: install it, or leave the"
                    " callback out: the job directory has TensorBoard's files without it"
                ) from error
        setting = "callbacks: EarlyStopping of Keras with monitor"
        if isinstance(callback, EarlyStopping):
            callback.evaluated = evaluated
            setting = "early_stopping"
        stops = isinstance(callback, keras.callbacks.EarlyStopping)
        if stops and callback.monitor.startswith("val_"):
            refuse_unevaluated(setting, callback.monitor, evaluated)

    floats_of_variables()
    epochs = math.ceil(progress.total_steps / progress.steps_per_epoch)
    return CallbackList(
        callbacks, model=model, epochs=epochs, steps=progress.steps_per_epoch, verbose=0
    )
