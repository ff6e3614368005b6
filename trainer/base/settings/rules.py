"""Names the metrics of a run, and checks the settings of a run against each other.

Imports no TensorFlow.

A config that `check` accepts has no two settings that contradict each other; what a built-in model
needs of its settings is checked by its config class in `model_settings`.
"""

import os
from collections.abc import Collection, Iterable

from trainer.base.errors import UserError
from trainer.base.settings.fields import as_text, fields_of, nearest
from trainer.base.settings.model_settings import CLASSIFIERS, MODELS
from trainer.base.settings.train_config import DATA_SOURCES, TrainConfig, contradiction
from trainer.base.storage import local_path
from trainer.base.tracker import read_addresses

# of a built-in classifier that has examples for evaluation
_EVALUATION_METRICS = ("val_loss", "val_accuracy")

# Measures of generated images, and which values are better. deploy and docs/quality.md have the
# same names.
_BETTER = {
    "fid": "lower",
    "kid": "lower",
    "precision": "higher",
    "recall": "higher",
    "density": "higher",
    "coverage": "higher",
}
IMAGE_MEASURES = tuple(_BETTER)
LOWER_IS_BETTER = tuple(name for name, better in _BETTER.items() if better == "lower")
_NO_DIRECTION = ("wasserstein_distance",)  # neither higher nor lower is better


def check_known(setting: str, value: str, subject: str, known: Iterable[str]) -> None:
    """Raises UserError, with the nearest name, if the value of a setting is not in `known`; "" is
    allowed."""
    names = sorted(known)
    if value and value not in names:
        raise UserError(
            f"{setting}={value}: {subject} {', '.join(names) or 'nothing'}{nearest(value, names)}"
        )


def check(config: TrainConfig) -> None:
    """Raises UserError if the settings contradict each other, or do not fit the built-in model."""
    data = config.data
    model = config.model
    fid = config.fid_every_steps
    is_path = any(sign in data for sign in "/.\\:") or os.path.exists(data)

    if not data:
        raise UserError(
            "data is missing: use --data=FOLDER (or gs://BUCKET/FOLDER) with your images, one"
            " folder a class for a classifier, or --data=digits to try the recipe without any"
        )
    if not is_path and data not in DATA_SOURCES:
        raise UserError(
            f"data={data}: no such data{nearest(data, DATA_SOURCES)} Known:"
            f" {', '.join(DATA_SOURCES)}, an existing path, or your own package.module:function"
        )
    if config.steps is not None and config.epochs is not None:
        raise UserError(
            f"steps={config.steps} and epochs={config.epochs} both set the length: drop one of them"
        )
    local_path(config.cache_dir, "cache_dir")  # these raise UserError for a value of another form
    config.rows_per_replica(config.replicas or 1)
    read_addresses(config.track)
    if any(number < 0 for number in config.class_weight):
        raise UserError(
            f"class_weight={as_text(config.class_weight)}: classes are numbered from 0: write"
            " 0:1,1:6.5"
        )
    # Settings that contradict each other.
    one_device = config.strategy == "one_device"
    if one_device and config.replicas > 1:
        raise contradiction(config, "strategy", "replicas", "drop one of them")
    if one_device and config.expect_devices > 1:
        raise contradiction(config, "strategy", "expect_devices", "drop one of them")
    if 0 < config.replicas < config.expect_devices:
        raise contradiction(
            config, "replicas", "expect_devices", "devices that are paid for would not be used"
        )
    if config.initial_checkpoint and config.initial_model:
        raise contradiction(config, "initial_checkpoint", "initial_model", "drop one of them")
    if config.steps and max(config.profiled, default=0) > config.steps:
        raise UserError(
            f"profile_steps={config.profile_steps}, but the run ends at step {config.steps}: take"
            " earlier ones"
        )
    if fid and model in CLASSIFIERS:
        raise UserError(f"fid_every_steps={fid}: {model} generates no images: drop the flag")
    config.check_model()
    if model in MODELS:  # the metrics of a user's own model are checked when it runs
        evaluated = _EVALUATION_METRICS if model in CLASSIFIERS else ()
        of_a_step = MODELS[model].metrics
        of_an_epoch = {*of_a_step, *evaluated} - {*_NO_DIRECTION}
        measured = [*evaluated, *(IMAGE_MEASURES if fid else ())]
        check_known("early_stopping", config.early_stopping, f"{model} can stop by", of_an_epoch)
        check_known("best_metric", config.best_metric, "this run measures", measured)
        check_known(
            "tuning_metric", config.tuning_metric, "this run reports", [*of_a_step, *measured]
        )


def check_used(names: Collection[str], config: TrainConfig) -> None:
    """Raises UserError if one of the settings that a command or a call names has no effect beside
    the others."""
    if "warmup_steps" in names and config.steps and config.warmup_steps > config.steps:
        raise contradiction(
            config, "warmup_steps", "steps", "the learning rate would never be reached"
        )
    for name, field in fields_of(type(config)).items():
        other = field.metadata["used_with"]
        if name in names and other and not getattr(config, other):
            raise UserError(
                f"{name}={as_text(getattr(config, name))} has no effect without {other}: give"
                f" --{other} too, or drop it"
            )
        if name == "sample_every_steps" and name in names and config.model in CLASSIFIERS:
            raise UserError(
                f"{name}={config.sample_every_steps}: {config.model} generates no images: drop it"
            )
