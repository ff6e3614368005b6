"""The values that a run measures, by name, and the settings that name one of them. Imports no TensorFlow."""

from collections.abc import Iterable

from trainer.config.fields import nearest
from trainer.config.train_config import TrainConfig
from trainer.errors import UserError

EVALUATION_METRICS = ("val_loss", "val_accuracy")  # of a classifier that has labelled examples to evaluate

# What steps of a named model give. A model of the user's own is known only when it runs.
_CLASSIFIER = ("accuracy", "loss")
STEP_VALUES = {
    "mlp": _CLASSIFIER,
    "cnn": _CLASSIFIER,
    "efficientnet": _CLASSIFIER,
    "dcgan": ("discriminator_loss", "generator_loss"),
    "wgan_gp": ("critic_loss", "generator_loss", "gradient_penalty", "wasserstein_distance"),
}
_NO_BETTER_SIDE = ("wasserstein_distance",)


def measures(*, evaluates: bool, fid_every_steps: int) -> list[str]:
    """What a run measures beside the values of its steps."""
    return [*(EVALUATION_METRICS if evaluates else ()), *(("fid", "kid") if fid_every_steps else ())]


def check_metric_names(config: TrainConfig) -> None:
    """UserError where a setting names what a run of this named model never has, with or without evaluation."""
    model, fid = config.model, config.fid_every_steps
    if model not in STEP_VALUES:
        return
    classifies = STEP_VALUES[model] is _CLASSIFIER
    if classifies and fid:
        raise UserError(f"fid_every_steps={fid}: {model} generates no images: drop the flag")
    of_a_step, found = STEP_VALUES[model], measures(evaluates=classifies, fid_every_steps=fid)
    of_an_epoch = [*of_a_step, *measures(evaluates=classifies, fid_every_steps=0)]
    check_known(
        "early_stopping", config.early_stopping, f"{model} can stop by", set(of_an_epoch) - set(_NO_BETTER_SIDE)
    )
    check_known("best_metric", config.best_metric, "this run measures", found)
    check_known("tuning_metric", config.tuning_metric, "this run reports", [*of_a_step, *found])


def check_known(setting: str, value: str, who_has: str, known: Iterable[str]) -> None:
    """UserError, with the nearest name, where a setting names a value that is not `known`; empty names none."""
    names = sorted(known)
    if value and value not in names:
        raise UserError(f"{setting}={value}: {who_has} {', '.join(names) or 'nothing'}{nearest(value, names)}")
