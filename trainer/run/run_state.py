"""Holds the state of a run beside its variables, which a checkpoint stores and a resumed run restores."""

import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import keras

from trainer.base.errors import UserError
from trainer.base.settings.rules import OF_IMAGES
from trainer.base.settings.train_config import TrainConfig
from trainer.reporting.progress import Progress, numbers
from trainer.reporting.reporter import Reporter
from trainer.training.callbacks import restore_callbacks, rises, state_of_callbacks
from trainer.training.state import LearningRates


class Best:
    """Holds the best value of one metric so far, and its step: of `best_metric` or what comes first in its stead.

    These are the metric of `early_stopping`, if it is measured, val_accuracy, FID and val_loss.

    A value of another metric, or, of images, of other features or image counts, replaces it; NaN never does.
    """

    def __init__(self, config: TrainConfig, model: keras.Model) -> None:
        self._model = model
        defaults = [config.early_stopping, "val_accuracy", "fid", "val_loss"]
        self._names = [config.best_metric] if config.best_metric else defaults
        self._features = f"{config.fid_features}, {config.fid_weights}, {config.fid_samples} images"
        self._state: dict[str, Any] = {}
        self.improved = False  # by the newest measurement

    def state(self) -> dict[str, Any]:
        """Returns {"metric", "features", "value", "step"}; {} if nothing has been measured."""
        return self._state

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restores what `state()` returned."""
        if state and state["value"] is not None:
            metric = str(state["metric"])
            features = str(state["features"]) if metric in OF_IMAGES else None
            value, step = float(state["value"]), int(state["step"])
            self._state = {"metric": metric, "features": features, "value": value, "step": step}

    def consider(self, values: Mapping[str, float], step: int) -> None:
        """Compares a measurement with the best so far; the first one measured is the best."""
        metric = next((name for name in self._names if name in values), None)
        if metric is None or math.isnan(values[metric]):
            return
        features = self._features if metric in OF_IMAGES else None
        now: dict[str, Any] = {"metric": metric, "features": features, "value": values[metric], "step": step}
        comparable = all(self._state.get(part) == now[part] for part in ("metric", "features"))
        better = operator.gt if rises(self._model, metric, "best_metric") else operator.lt
        if not comparable or better(now["value"], self._state["value"]):
            self._state, self.improved = now, True


@dataclass
class RunState:
    """Holds how far a run is, what it has measured, and what its callbacks know."""

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
        """Returns what `fit` returns as History.history: by name, the value of each epoch so far."""
        history = self.history.history.items()
        return {
            name: [float(value) for value in values if isinstance(value, SupportsFloat)] for name, values in history
        }

    def content(self, *, pending: bool = False) -> dict[str, Any]:
        """Returns what a checkpoint stores; `pending`: the hooks of this step have not run."""
        return {
            **self.progress.state(),
            "reporter": self.reporter.state(),
            "callbacks": state_of_callbacks(self.callbacks),
            "history": self.values_of_epochs(),
            "learning_rates": self.rates.state(),
            "best": self.best.state(),
            "pending": pending,
        }

    def resume(self) -> None:
        """Restores all but callbacks. Raises UserError if the state is not what this version stores."""
        if self.restored:
            with self._readable():
                self.progress.resume(self.restored)
                self.reporter.resume(self.restored["reporter"])
                self.best.resume(self.restored["best"])

    def resume_callbacks(self) -> None:
        """Restores callbacks and the rates that they set, after their on_train_begin, in which Keras resets them."""
        if self.restored:
            with self._readable():
                restore_callbacks(self.callbacks, self.restored["callbacks"])
                history = self.restored["history"].items()
                self.history.history = {name: [*numbers(dict(enumerate(values))).values()] for name, values in history}
                self.rates.resume(self.restored["learning_rates"])

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(
                f"{self.origin}: its state is of another version of this trainer ({error!r}): use that version, or "
                "another --job_dir"
            ) from error
