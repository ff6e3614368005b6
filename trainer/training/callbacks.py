"""Keras callbacks of the user's own, under our loop: epoch hooks as in `fit`, batch hooks once a call to the device."""

import math
from collections.abc import Mapping
from typing import Any

import keras

from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.imports import load_function
from trainer.log import log
from trainer.progress import Progress, larger_is_better
from trainer.settings import nearest

_EVALUATED = ("val_loss", "val_accuracy")


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's own, which says what it does, and refuses a value that no epoch has."""

    def __init__(self, monitor: str, patience: int) -> None:
        super().__init__(monitor=monitor, patience=patience, mode="max" if larger_is_better(monitor) else "min")
        self.evaluates = False  # whether epochs have val_loss and val_accuracy

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Refuses, after the first call to the device, a value that no epoch will have."""
        known = sorted({*(logs or {}), *(_EVALUATED if self.evaluates else ())})
        if self.monitor not in known:
            near = nearest(self.monitor, known)
            raise UserError(f"early_stopping={self.monitor}: an epoch has {', '.join(known)}{near}")

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Counts the epochs without improvement."""
        super().on_epoch_end(epoch, logs)
        if self.model.stop_training:
            log.info(f"early stopping: {self.monitor} got no better in {self.patience} epochs")


def load_callbacks(config: TrainConfig) -> list[keras.callbacks.Callback]:
    """The callbacks that `config.callbacks` (package.module:function) returns, and early stopping."""
    path = config.callbacks
    found: Any = load_function(path, "callbacks")() if path else []
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, keras.callbacks.Callback) for one in found):
        raise UserError(f"callbacks={path}: it must return a list of keras.callbacks.Callback, it returned {found!r}")
    stopping = [EarlyStopping(config.early_stopping, config.patience)] if config.early_stopping else []
    return [*found, *stopping]


_STATE = ("wait", "best", "best_epoch", "stopped_epoch")


def state_of_callbacks(callbacks: list[keras.callbacks.Callback]) -> dict[str, Any]:
    """What a checkpoint keeps of early stopping; callbacks of the user's own begin anew with every process."""
    return {name: getattr(one, name) for one in callbacks if isinstance(one, EarlyStopping) for name in _STATE}


def restore_callbacks(callbacks: list[keras.callbacks.Callback], state: Mapping[str, Any]) -> None:
    """Goes on from what `state_of_callbacks` gave; called after on_train_begin, which begins anew."""
    for callback in callbacks:
        if isinstance(callback, EarlyStopping):
            for name, value in state.items():
                setattr(callback, name, value)


def bind(
    callbacks: list[keras.callbacks.Callback], model: keras.Model, progress: Progress, *, evaluates: bool
) -> keras.callbacks.CallbackList:
    """`callbacks` with the model and the length of the run, as `fit` gives it to them.

    UserError where one waits for a value of evaluation, and there is none.
    """
    for callback in callbacks:
        if isinstance(callback, EarlyStopping):
            callback.evaluates = evaluates
            if callback.monitor in _EVALUATED and not evaluates:
                raise UserError(
                    f"early_stopping={callback.monitor}: nothing is evaluated: give labelled examples for it, or hold "
                    "some back with --evaluation_fraction=0.1, or drop early_stopping"
                )
    epochs = math.ceil(progress.total_steps / progress.steps_per_epoch)
    return keras.callbacks.CallbackList(
        callbacks, model=model, epochs=epochs, steps=progress.steps_per_epoch, verbose=0
    )
