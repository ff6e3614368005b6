"""The values that a run measures, by name, and the settings that name one of them. Imports no TensorFlow."""

from collections.abc import Iterable

from trainer.errors import UserError
from trainer.settings import nearest

EVALUATED = ("val_loss", "val_accuracy")  # of a classifier that has labelled examples to evaluate

# What steps of a named model give that has a better side. A model of the user's own is known only when it runs.
_CLASSIFIER = ("accuracy", "loss")
STEP_VALUES = {
    "mlp": _CLASSIFIER,
    "cnn": _CLASSIFIER,
    "efficientnet": _CLASSIFIER,
    "dcgan": ("discriminator_loss", "generator_loss"),
    "wgan_gp": ("critic_loss", "generator_loss", "gradient_penalty"),
}


def measures(*, evaluates: bool, fid_every_steps: int) -> list[str]:
    """What a run measures beside the values of its steps."""
    return [*(EVALUATED if evaluates else ()), *(("fid", "kid") if fid_every_steps else ())]


def check_measures(model: str, early_stopping: str, best_metric: str, fid_every_steps: int) -> None:
    """UserError where a setting names what a run of this named model never has, with or without evaluation."""
    if model not in STEP_VALUES:
        return
    classifies = STEP_VALUES[model] is _CLASSIFIER
    if classifies and fid_every_steps:
        raise UserError(f"fid_every_steps={fid_every_steps}: {model} generates no images: drop the flag")
    found = measures(evaluates=classifies, fid_every_steps=fid_every_steps)
    of_an_epoch = [*STEP_VALUES[model], *measures(evaluates=classifies, fid_every_steps=0)]
    check_known("early_stopping", early_stopping, f"{model} can stop by", of_an_epoch)
    check_known("best_metric", best_metric, "this run measures", found)


def check_known(setting: str, value: str, who_has: str, known: Iterable[str]) -> None:
    """UserError, with the nearest name, where a setting names a value that is not `known`; empty names none."""
    names = sorted(known)
    if value and value not in names:
        raise UserError(f"{setting}={value}: {who_has} {', '.join(names) or 'nothing'}{nearest(value, names)}")
