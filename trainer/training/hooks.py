"""What happens between calls to the device, and in which order: reports, evaluation, FID, samples, checkpoints."""

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import keras

from trainer.build import TrainingSetup
from trainer.config.metric_names import check_known, measures
from trainer.config.train_config import TrainConfig
from trainer.data.sources import beside_data
from trainer.distribution.strategy import Replicas
from trainer.errors import UserError
from trainer.reporting.progress import Progress
from trainer.reporting.reporter import Reporter
from trainer.training.evaluation import Evaluation
from trainer.training.fid import Extractor, Fid
from trainer.training.loop import Hook
from trainer.training.preemption import Control


class Best:
    """The best value of one metric so far, and its step: `best_metric`, or else val_accuracy or FID.

    It begins anew where values do not compare: with another metric, and of FID and KID with other features or another
    number of images. NaN is never the best.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._names = [config.best_metric] if config.best_metric else ["val_accuracy", "fid"]
        self._features = f"{config.fid_features}, {config.fid_weights}, {config.fid_samples} images"
        self._state: dict[str, Any] = {}
        self.improved = False  # by the newest measurement

    def state(self) -> dict[str, Any]:
        """{"metric", "features", "value", "step"}; {} where nothing was measured yet."""
        return self._state

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state()` gave."""
        if state and state["value"] is not None:
            features = str(state.get("features", self._features))
            self._state = self._measured(str(state["metric"]), features, float(state["value"]), int(state["step"]))

    def consider(self, found: Mapping[str, float], step: int) -> None:
        """Compares a measurement with the best so far; the first that is measured is the best."""
        name = next((name for name in self._names if name in found), None)
        if name is None or math.isnan(found[name]):
            return
        now, before = self._measured(name, self._features, found[name], step), self._state
        compares = all(before.get(part) == now[part] for part in ("metric", "features"))
        better = operator.gt if name == "val_accuracy" else operator.lt
        if not compares or better(now["value"], before["value"]):
            self._state, self.improved = now, True

    @staticmethod
    def _measured(metric: str, features: str, value: float, step: int) -> dict[str, Any]:
        of_images = metric in ("fid", "kid")
        return {"metric": metric, "features": features if of_images else None, "value": value, "step": step}


def make_hooks(
    assembly: TrainingSetup,
    reporter: Reporter,
    callbacks: keras.callbacks.CallbackList,
    evaluate: Evaluation | None,
    best: Best,
    save: Hook,
    job_dir: Path,
    control: Control,
) -> list[Hook]:
    """The events of a run in their order. An epoch's end may stop the run: what comes at the end comes after it.

    `save` is the last: a checkpoint holds what all the others did.
    """
    config, model, steps_per_epoch = assembly.config, assembly.model, assembly.schedule.steps_per_epoch

    def end_epoch(progress: Progress) -> None:
        means = reporter.epoch_end(progress)
        callbacks.on_epoch_end(int(progress.epoch) - 1, means)
        control.agree_to_stop(model)
        if not (progress.ends or model.stop_training):
            callbacks.on_epoch_begin(int(progress.epoch))

    def measured(tell: Callable[..., None], measure: Callable[[], dict[str, float]]) -> Callable[[Progress], None]:
        def act(progress: Progress) -> None:
            found = measure()
            tell(progress, found)
            best.consider(found, progress.step)

        return act

    reporter.metric_names = measures(evaluates=evaluate is not None, fid_every_steps=config.fid_every_steps)
    check_known("best_metric", config.best_metric, "this run measures", reporter.metric_names)
    events = [Hook(steps_per_epoch, measured(reporter.evaluated, evaluate))] if evaluate else []
    # Calls are cut at epoch ends too: an epoch's seconds are then measured, not apportioned.
    events.append(Hook(steps_per_epoch, end_epoch, at_end=False))
    events.append(Hook(config.report_every_steps, reporter.report))
    if config.fid_every_steps:
        fid, cache = _fid(assembly, job_dir, control.watched())
        tell = partial(reporter.quality, features=config.fid_features, samples=fid.samples)
        events.append(Hook(config.fid_every_steps, measured(tell, partial(fid, cache))))
    if hasattr(model, "sample"):
        events.append(Hook(config.sample_every_steps, partial(reporter.sample, model.sample, model.latent_dim)))
    return [*events, save]


def _fid(assembly: TrainingSetup, job_dir: Path, replicas: Replicas) -> tuple[Fid, Path]:
    """What computes FID and KID, and where the real features are kept: beside the data, or in `job_dir`."""
    config, model = assembly.config, assembly.model
    missing = [name for name in ("averaged_generator", "latent_dim") if not hasattr(model, name)]
    if missing:
        raise UserError(
            f"fid_every_steps={config.fid_every_steps}: {config.model} has no {' and no '.join(missing)}: FID needs a "
            "generator of images: drop the flag, or give your model what trainer/models/__init__.py says"
        )
    with replicas.strategy.scope():
        extractor = Extractor(config.fid_features, config.fid_weights, config.cache_dir)
    fid = Fid(model, replicas, extractor, assembly.dataset.train, config.fid_samples, config.seed)
    return fid, beside_data(config.data, job_dir) / f".fid-{extractor.identity}.npz"
