"""Names the metrics of a run, and checks the settings of a run against each other. Imports no TensorFlow.

A config that `check` accepts has no two settings that contradict each other; what a built-in model needs of its
settings is checked by `trainer.models.model_settings`, which `check` calls.
"""

import os
from collections.abc import Iterable
from importlib import import_module

from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest
from trainer.base.settings.train_config import (
    AUGMENTATIONS,
    BLOCKS,
    DATA_SOURCES,
    LAYERS,
    MODELS,
    TrainConfig,
    names_in,
)
from trainer.base.storage import local_path
from trainer.base.tracker import read_addresses

_EVALUATION_METRICS = ("val_loss", "val_accuracy")  # of a built-in classifier that has examples for evaluation

# What the steps of a built-in model report. The metrics of a user's own model are known only when it runs.
_CLASSIFIER = ("accuracy", "loss")
STEP_METRICS = {
    "mlp": _CLASSIFIER,
    "cnn": _CLASSIFIER,
    "efficientnet": _CLASSIFIER,
    "dcgan": ("discriminator_loss", "generator_loss"),
    "r3gan": ("critic_loss", "generator_loss", "gradient_penalty"),
    "wgan_gp": ("critic_loss", "generator_loss", "gradient_penalty", "wasserstein_distance"),
}
CLASSIFIERS = tuple(name for name, metrics in STEP_METRICS.items() if metrics is _CLASSIFIER)
# Measures of generated images, and which values are better. deploy and docs/quality.md have the same names.
_BETTER = {
    "fid": "lower", "kid": "lower", "precision": "higher", "recall": "higher", "density": "higher",
    "coverage": "higher",
}  # fmt: skip
IMAGE_MEASURES = tuple(_BETTER)
LOWER_IS_BETTER = tuple(name for name, better in _BETTER.items() if better == "lower")
_NO_DIRECTION = ("wasserstein_distance",)  # neither higher nor lower is better


def check_known(setting: str, value: str, subject: str, known: Iterable[str]) -> None:
    """Raises UserError, with the nearest name, if the value of a setting is not in `known`; "" is allowed."""
    names = sorted(known)
    if value and value not in names:
        raise UserError(f"{setting}={value}: {subject} {', '.join(names) or 'nothing'}{nearest(value, names)}")


_RULES_OF_MODELS = "trainer.models.model_settings"  # imported by name: base/ must not depend on models/


def check(config: TrainConfig) -> None:
    """Raises UserError if the settings contradict each other, or do not fit the built-in model."""
    data, model, fid = config.data, config.model, config.fid_every_steps
    is_path = any(sign in data for sign in "/.\\:") or os.path.exists(data)
    if config.channels == 2:
        raise UserError("channels=2: images have 1 channel (grey) or 3 (colour)")
    if not data:
        raise UserError(
            "data is missing: use --data=FOLDER (or gs://BUCKET/FOLDER) with your images, one folder a class for a "
            "classifier, or --data=digits to try the recipe without any"
        )
    if not is_path and data not in DATA_SOURCES:
        raise UserError(
            f"data={data}: no such data{nearest(data, DATA_SOURCES)} Known: {', '.join(DATA_SOURCES)}, an existing "
            "path, or your own package.module:function"
        )
    for name in names_in(config.augment):
        check_known("augment", name, "the augmentations are", AUGMENTATIONS)
    layers = names_in(config.remat.removeprefix(LAYERS)) if config.remat.startswith(LAYERS) else ()
    local_path(config.cache_dir, "cache_dir")  # these raise UserError for a value of another form
    config.rows_per_replica(config.replicas or 1)
    read_addresses(config.track)
    _ = config.class_weights
    last_profiled, one_device = max(config.profiled, default=0), config.strategy == "one_device"
    own = "drop it; a model of your own may have them in its loss or its data"
    if one_device and config.replicas > 1:
        raise UserError(contradiction(config, "strategy", "replicas", "drop one of them"))
    if one_device and config.expect_devices > 1:
        raise UserError(contradiction(config, "strategy", "expect_devices", "drop one of them"))
    if 0 < config.replicas < config.expect_devices:
        raise UserError(
            contradiction(config, "replicas", "expect_devices", "devices that are paid for would not be used")
        )
    if config.initial_checkpoint and config.initial_model:
        raise UserError(contradiction(config, "initial_checkpoint", "initial_model", "drop one of them"))
    if config.steps and last_profiled > config.steps:
        raise UserError(
            f"profile_steps={config.profile_steps}, but the run ends at step {config.steps}: take earlier ones"
        )
    if config.remat not in ("", BLOCKS) and not layers:
        raise UserError(f"remat={config.remat} must be {BLOCKS}, or {LAYERS}NAME,… with names of layers")
    for name in ("label_smoothing", "mixup"):
        if getattr(config, name) and model not in CLASSIFIERS:
            raise UserError(f"{name}={getattr(config, name)}: only {', '.join(CLASSIFIERS)} have soft labels: {own}")
    if fid and model in CLASSIFIERS:
        raise UserError(f"fid_every_steps={fid}: {model} generates no images: drop the flag")
    if model in MODELS:
        import_module(_RULES_OF_MODELS).check(config)
    if model in STEP_METRICS:  # the metrics of a user's own model are checked when it runs
        evaluated = _EVALUATION_METRICS if model in CLASSIFIERS else ()
        of_a_step, measured = STEP_METRICS[model], [*evaluated, *(IMAGE_MEASURES if fid else ())]
        of_an_epoch = {*of_a_step, *evaluated} - {*_NO_DIRECTION}
        check_known("early_stopping", config.early_stopping, f"{model} can stop by", of_an_epoch)
        check_known("best_metric", config.best_metric, "this run measures", measured)
        check_known("tuning_metric", config.tuning_metric, "this run reports", [*of_a_step, *measured])


def contradiction(config: TrainConfig, setting: str, other: str, advice: str) -> str:
    """Returns the error line for two settings whose values exclude each other."""
    both = f"{setting}={getattr(config, setting)} and {other}={getattr(config, other)}"
    return f"{both} contradict each other: {advice}"
