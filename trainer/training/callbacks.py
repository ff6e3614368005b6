"""Keras callbacks of the user's own, under our loop: epoch hooks as in `fit`, batch hooks once a call to the device."""

import math
from collections.abc import Mapping
from typing import Any

import keras

from trainer.config.metric_names import EVALUATION_METRICS, check_known
from trainer.config.train_config import TrainConfig
from trainer.config.user_code import load_function
from trainer.errors import UserError
from trainer.log import log
from trainer.reporting.progress import Progress, is_loss


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's own, which says what it does, and refuses a value that no epoch has, or that has no better side.

    A loss is to fall and an accuracy to rise; of any other value Keras asks the model's metric of that name.
    """

    def __init__(self, monitor: str, patience: int) -> None:
        mode = "min" if is_loss(monitor) else "max" if "accuracy" in monitor else "auto"
        super().__init__(monitor=monitor, patience=patience, mode=mode)
        self.best: float | None = None
        self.evaluates = False  # whether epochs have val_loss and val_accuracy
        self.checked = False

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Refuses, after the first call to the device, what no epoch can be compared by."""
        known = {*(logs or {}), *(EVALUATION_METRICS if self.evaluates else ())}
        check_known("early_stopping", self.monitor, "an epoch has", known)
        if not self.checked:
            # Keras decides whether less or more is better at the end of the first epoch: this callback ends one now.
            rehearsal = keras.callbacks.EarlyStopping(monitor=self.monitor, mode=self.mode)
            rehearsal.set_model(self.model)
            rehearsal.on_train_begin()
            try:
                rehearsal.on_epoch_end(0, {self.monitor: 0.0})
            except ValueError:
                raise UserError(
                    f"early_stopping={self.monitor}: it is not known whether more of it is better: take a loss, an "
                    "accuracy or a metric of Keras"
                ) from None
            self.checked = True

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Counts the epochs without improvement; NaN is none, although Keras takes any first value for the best."""
        value = (logs or {}).get(self.monitor, 0.0)
        first_is_nan = self.best is None and math.isnan(value)
        if first_is_nan:
            self.best = value  # nothing is an improvement on NaN, itself included
        super().on_epoch_end(epoch, logs)
        if first_is_nan:
            self.best = None
        if self.stopped_epoch == epoch > 0:
            log.info(f"early stopping: {self.monitor} got no better in {self.patience} epochs")


def load_callbacks(config: TrainConfig) -> list[keras.callbacks.Callback]:
    """The callbacks that `config.callbacks` (package.module:function) returns, and early stopping."""
    path = config.callbacks
    found: Any = load_function(path, "callbacks")() if path else []
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, keras.callbacks.Callback) for one in found):
        raise UserError(f"callbacks={path}: it must return a list of keras.callbacks.Callback, it returned {found!r}")
    stopping = [EarlyStopping(config.early_stopping, config.patience)] if config.early_stopping else []
    return [*found, *stopping]


_STATE = ("monitor", "wait", "best", "best_epoch", "stopped_epoch")  # before `monitor` was kept, the others alone


def state_of_callbacks(callbacks: list[keras.callbacks.Callback]) -> dict[str, Any]:
    """What a checkpoint keeps of early stopping; callbacks of the user's own begin anew with every process.

    What they made of the learning rate is kept (trainer.training.state).
    """
    return {name: getattr(one, name) for one in callbacks if isinstance(one, EarlyStopping) for name in _STATE}


def restore_callbacks(callbacks: list[keras.callbacks.Callback], state: Mapping[str, Any]) -> None:
    """Goes on from what `state_of_callbacks` gave; called after on_train_begin, which begins anew.

    Early stopping stays at its beginning where the run that goes on watches another value.
    """
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and state.get("monitor", callback.monitor) == callback.monitor:
            for name, value in state.items():
                setattr(callback, name, value)


_OF_THE_OPTIMIZER = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)


def bind(
    callbacks: list[keras.callbacks.Callback], model: keras.Model, progress: Progress, *, evaluates: bool
) -> keras.callbacks.CallbackList:
    """`callbacks` with the model and the length of the run, as `fit` gives it to them.

    UserError where one waits for a value of evaluation, and there is none, or for an optimizer of a model without.
    """
    for callback in callbacks:
        if isinstance(callback, _OF_THE_OPTIMIZER) and getattr(model, "optimizer", None) is None:
            raise UserError(
                f"callbacks: {type(callback).__name__} changes model.optimizer, and this model is not compiled with "
                "one: take --learning_rate_schedule and --warmup_steps, or a callback that knows its optimizers"
            )
        if isinstance(callback, EarlyStopping):
            callback.evaluates = evaluates
            if callback.monitor in EVALUATION_METRICS and not evaluates:
                raise UserError(
                    f"early_stopping={callback.monitor}: nothing is evaluated: give labelled examples for it, or hold "
                    "some back with --evaluation_fraction=0.1, or drop early_stopping"
                )
    epochs = math.ceil(progress.total_steps / progress.steps_per_epoch)
    return keras.callbacks.CallbackList(
        callbacks, model=model, epochs=epochs, steps=progress.steps_per_epoch, verbose=0
    )
