"""Builds the hooks that run between calls to the device, in order: reports, evaluation, FID, samples, checkpoints."""

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras

from trainer.base.settings.metric_names import OF_IMAGES, check_known
from trainer.base.settings.train_config import TrainConfig
from trainer.measures.evaluation import Evaluation
from trainer.measures.fid import Fid
from trainer.reporting.progress import Progress
from trainer.reporting.reporter import Reporter
from trainer.training.callbacks import refuse_unevaluated, rises
from trainer.training.loop import Hook
from trainer.training.preemption import Control
from trainer.user_code.interface import ModelInterface


class Best:
    """Holds the best value of one metric so far, and its step: `best_metric`, or else val_accuracy, FID or val_loss.

    A value of another metric, or, of images, of other features or image counts, replaces it; NaN never does.
    """

    def __init__(self, config: TrainConfig, model: keras.Model) -> None:
        self._model = model
        self._names = [config.best_metric] if config.best_metric else ["val_accuracy", "fid", "val_loss"]
        self._features = f"{config.fid_features}, {config.fid_weights}, {config.fid_samples} images"
        self._state: dict[str, Any] = {}
        self.improved = False  # by the newest measurement

    def state(self) -> dict[str, Any]:
        """Returns {"metric", "features", "value", "step"}; {} if nothing has been measured."""
        return self._state

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restores what `state()` returned."""
        if state and state["value"] is not None:
            features = str(state.get("features", self._features))
            self._state = self._measured(str(state["metric"]), features, float(state["value"]), int(state["step"]))

    def consider(self, found: Mapping[str, float], step: int) -> None:
        """Compares a measurement with the best so far; the first one measured is the best."""
        name = next((name for name in self._names if name in found), None)
        if name is None or math.isnan(found[name]):
            return
        now, before = self._measured(name, self._features, found[name], step), self._state
        comparable = all(before.get(part) == now[part] for part in ("metric", "features"))
        better = operator.gt if rises(self._model, name, "best_metric") else operator.lt
        if not comparable or better(now["value"], before["value"]):
            self._state, self.improved = now, True

    @staticmethod
    def _measured(metric: str, features: str, value: float, step: int) -> dict[str, Any]:
        of_images = metric in OF_IMAGES
        return {"metric": metric, "features": features if of_images else None, "value": value, "step": step}


def make_hooks(
    config: TrainConfig,
    model: keras.Model,
    steps_per_epoch: int,
    reporter: Reporter,
    callbacks: keras.callbacks.CallbackList,
    evaluate: Evaluation | None,
    fid: Fid | None,
    best: Best,
    control: Control,
) -> list[Hook]:
    """Returns all hooks but the checkpoint, which must be last. An epoch's end may stop the run: it comes early."""

    def end_epoch(progress: Progress) -> None:
        means = reporter.epoch_end(progress)
        callbacks.on_epoch_end(int(progress.epoch) - 1, means)
        control.agree_to_stop(model)
        if not (progress.ends or model.stop_training):
            callbacks.on_epoch_begin(int(progress.epoch))

    def measuring(measure: Callable[[], dict[str, float]], report: Callable[..., None]) -> Callable[[Progress], None]:
        def act(progress: Progress) -> None:
            found = measure()
            report(progress, found)
            best.consider(found, progress.step)

        return act

    reporter.metric_names = [*(evaluate.names if evaluate else ()), *(fid.names if fid else ())]
    if config.best_metric.startswith("val_") and not evaluate:
        refuse_unevaluated("best_metric", config.best_metric, ())
    check_known("best_metric", config.best_metric, "this run measures", reporter.metric_names)
    if config.best_metric:
        rises(model, config.best_metric, "best_metric")
    hooks = [Hook(steps_per_epoch, measuring(evaluate, reporter.evaluated))] if evaluate else []
    # Calls are cut at epoch ends too: an epoch's seconds are then measured, not apportioned.
    hooks.append(Hook(steps_per_epoch, end_epoch, at_end=False))
    hooks.append(Hook(config.report_every_steps, reporter.report))
    if evaluate and evaluate.counts_classes:
        hooks.append(Hook(0, lambda progress: reporter.classified(progress, evaluate.classes)))
    if fid:

        def report(progress: Progress, found: dict[str, float]) -> None:
            reporter.quality(progress, found, fid.about)

        hooks.append(Hook(config.fid_every_steps, measuring(fid, report)))
    interface = ModelInterface.of(model)
    if sampler := interface.sampler:
        draw = partial(reporter.sample, sampler.sample, sampler.latent_dim, interface.generated_classes)
        hooks.append(Hook(config.sample_every_steps, draw))
    return hooks
