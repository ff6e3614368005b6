"""Holds what a checkpoint keeps besides variables: progress, measurements, and the state of
callbacks."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import SupportsFloat

import keras
from keras.callbacks import (
    Callback,
    CallbackList,
    CSVLogger,
    EarlyStopping,
    History,
    ModelCheckpoint,
)

from trainer.base.errors import UserError
from trainer.base.settings.rules import IMAGE_MEASURES
from trainer.base.settings.train_config import TrainConfig
from trainer.reporting.progress import Progress, SavedProgress, State
from trainer.reporting.reporter import Reporter
from trainer.training.callback_states import CallbackStates, drop_epochs
from trainer.training.callbacks import WRITERS, callback_list, higher_is_better
from trainer.training.checkpoint import Arrays, LearningRates


@dataclass
class SavedState(SavedProgress):
    """Holds what the manifest of a checkpoint has under "state", by the names of its entries."""

    reporter: State
    callbacks: State  # as in `CallbackStates.changed`
    arrays: Arrays  # of callbacks; not in the manifest, but beside the variables
    # the values of each epoch, as in History.history of `fit`
    history: Mapping[str, Sequence[float | None]]
    learning_rates: Sequence[float]  # as in `LearningRates.state`
    best: State
    pending: bool  # whether the hooks of this step have not run, because a signal came first


@dataclass
class Best:
    """Holds the best value of one metric so far, and its step.

    The metric is `best_metric`; without it, the first that is measured of: those by which callbacks
    stop or save, val_accuracy, FID, val_loss. A value that is not comparable (another metric,
    or FID by other features or image counts) replaces the best one; NaN never does.
    """

    config: TrainConfig
    model: keras.Model
    callbacks: Sequence[Callback] = ()
    # {"metric", "features", "value", "step"}; {} if nothing is measured
    state: State = field(default_factory=dict)
    improved: bool = False  # whether a measurement has improved it since the last checkpoint

    def resume(self, state: State) -> None:
        """Restores the `state` of an earlier start."""
        if state and state["value"] is not None:
            self.state = state

    def consider(self, values: Mapping[str, float], step: int) -> None:
        """Replaces the best value if this one is better, not comparable, or the first."""
        config = self.config
        modes = {
            callback.monitor: callback.mode
            for callback in self.callbacks
            if isinstance(callback, EarlyStopping)
            or (isinstance(callback, ModelCheckpoint) and callback.save_best_only)
        }
        defaults = (*modes, "val_accuracy", "fid", "val_loss")
        names = (config.best_metric,) if config.best_metric else defaults
        metric = next((name for name in names if name in values), None)
        if metric is None or math.isnan(values[metric]):
            return
        features = f"{config.fid_features}, {config.fid_samples} images"
        compared = {"metric": metric, "features": features if metric in IMAGE_MEASURES else None}
        comparable = all(self.state.get(name) == value for name, value in compared.items())
        higher = higher_is_better(self.model, metric, "best_metric", modes.get(metric, "auto"))
        better = operator.gt if higher else operator.lt
        if not comparable or better(values[metric], self.state["value"]):
            self.state = {**compared, "value": values[metric], "step": step}
            self.improved = True


@dataclass
class RunState:
    """Holds the objects whose state a checkpoint keeps, and what the run has restored of them."""

    progress: Progress
    reporter: Reporter
    best: Best
    callbacks: list[Callback]
    rates: LearningRates
    origin: str  # the address of the checkpoint that the run resumes from
    saved: SavedState | None = None  # the content of that checkpoint; None for a new run
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        self._callback_states = CallbackStates(self.callbacks)

    @property
    def pending(self) -> bool:
        """Returns whether the hooks of the restored step must still run, after a signal."""
        return self.saved is not None and self.saved.pending

    def values_of_epochs(self) -> dict[str, list[float]]:
        """Returns the values of each epoch so far, by name, like History.history of `fit`."""
        epochs = {}
        for name, values in self.history.history.items():
            epochs[name] = [float(value) for value in values if isinstance(value, SupportsFloat)]
        return epochs

    def content(self, *, pending: bool = False) -> SavedState:
        """Returns what a checkpoint stores; `pending`: the hooks of this step have not run."""
        callbacks, arrays = self._callback_states.changed()
        return SavedState(
            **vars(self.progress.state()),
            reporter=self.reporter.state(),
            callbacks=callbacks,
            arrays=arrays,
            history=self.values_of_epochs(),
            learning_rates=self.rates.state(),
            best=self.best.state,
            pending=pending,
        )

    def resume(self, content: State) -> None:
        """Restores all but callbacks from the `content` of a checkpoint.

        Raises UserError for another version's.
        """
        with self._refusing_other_versions():
            content = {"arrays": {}, **content}
            values = {entry.name: content[entry.name] for entry in fields(SavedState)}
            self.saved = SavedState(**values)
            self.progress.resume(self.saved)
            self.reporter.resume(self.saved.reporter)
            self.best.resume(self.saved.best)

    def begin_callbacks(
        self,
        model: keras.Model,
        evaluated: Sequence[str],
        writes: Callable[[str], bool] = lambda path: True,
    ) -> CallbackList:
        """Returns the callbacks, set up as in `fit`, begun and restored.

        evaluated: the names of the values of evaluation; writes: whether this worker runs those of
            Keras's callbacks that only write, by the path to which they do.
        """
        saved = self.saved
        progress = self.progress
        acting = [
            callback
            for callback in self.callbacks
            if (place := WRITERS.get(type(callback))) is None
            or writes(str(getattr(callback, place)))
        ]
        callbacks = callback_list([*acting, self.history], model, progress, evaluated)
        model.stop_training = False

        # The file of a CSVLogger is continued, without the epochs that are trained again.
        epoch = (progress.step - self.pending) // progress.steps_per_epoch
        for callback in acting if saved else ():
            if isinstance(callback, CSVLogger):
                callback.append = True
                drop_epochs(Path(callback.filename), callback.sep, epoch)
        callbacks.on_train_begin()

        # Keras's callbacks reset themselves and learning rates in on_train_begin. What they changed
        # at the start of an epoch that had begun is restored, too.
        self._callback_states.begin()
        had_begun = saved is not None and (self.pending or progress.step < saved.total_steps)
        if had_begun:
            callbacks.on_epoch_begin(epoch)
        if saved:
            with self._refusing_other_versions():
                self._callback_states.restore(saved.callbacks, saved.arrays)
                for name, values in saved.history.items():
                    numbers = [math.nan if value is None else float(value) for value in values]
                    self.history.history[name] = numbers
                self.rates.resume(saved.learning_rates)

        # The counts of metrics go on within an epoch, and begin anew at its start.
        if progress.step % progress.steps_per_epoch == 0 and not self.pending:
            model.reset_metrics()
        if not (had_begun or progress.finished):
            callbacks.on_epoch_begin(epoch)
        return callbacks

    @contextmanager
    def _refusing_other_versions(self) -> Iterator[None]:
        """Turns errors that state of another version raises, within the block, into a UserError."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(
                f"{self.origin}: its state is of another version of this trainer ({error!r}): use"
                " that version, or another --job_dir"
            ) from error
