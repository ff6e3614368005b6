"""Names the values that a run measures, and checks the settings that refer to one of them. Imports no TensorFlow."""

from collections.abc import Iterable

from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest
from trainer.base.settings.train_config import TrainConfig

_EVALUATION_METRICS = ("val_loss", "val_accuracy")  # of a built-in classifier that has examples for evaluation

# What steps of a built-in model report. Those of a user's own model are known only when it runs.
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
OF_IMAGES = tuple(_BETTER)
FALLING = tuple(name for name, better in _BETTER.items() if better == "lower")
_NO_DIRECTION = ("wasserstein_distance",)  # neither higher nor lower is better


def check_metric_names(config: TrainConfig) -> None:
    """Raises UserError if a setting names a metric that a run of this built-in model never has."""
    model, fid = config.model, config.fid_every_steps
    if model not in STEP_METRICS:
        return
    classifies = model in CLASSIFIERS
    if classifies and fid:
        raise UserError(f"fid_every_steps={fid}: {model} generates no images: drop the flag")
    evaluated = _EVALUATION_METRICS if classifies else ()
    of_a_step, measured = STEP_METRICS[model], [*evaluated, *(OF_IMAGES if fid else ())]
    of_an_epoch = {*of_a_step, *evaluated} - {*_NO_DIRECTION}
    check_known("early_stopping", config.early_stopping, f"{model} can stop by", of_an_epoch)
    check_known("best_metric", config.best_metric, "this run measures", measured)
    check_known("tuning_metric", config.tuning_metric, "this run reports", [*of_a_step, *measured])


def check_known(setting: str, value: str, subject: str, known: Iterable[str]) -> None:
    """Raises UserError, with the nearest name, if a setting names a metric that is not in `known`; empty is allowed."""
    names = sorted(known)
    if value and value not in names:
        raise UserError(f"{setting}={value}: {subject} {', '.join(names) or 'nothing'}{nearest(value, names)}")
