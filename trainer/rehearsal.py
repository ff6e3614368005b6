"""Tries on a user's own model and data, before training, what a run does only after hours: evaluation, sample, save."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf

from trainer.build import TrainingSetup
from trainer.config.train_config import DATA_SOURCES, MODELS, TrainConfig
from trainer.data.images import as_uint8, noise
from trainer.data.sources import is_named
from trainer.errors import UserError
from trainer.export import export
from trainer.interface import ModelInterface
from trainer.training.checkpoint import read_checkpoint, write_checkpoint
from trainer.training.evaluation import Evaluation
from trainer.training.state import check_fits, refuse_unbuilt_optimizers, snapshot, variables_of
from trainer.user_mistakes import as_user_mistake, message_of

_IMAGES = 2


def has_own_parts(config: TrainConfig) -> bool:
    """Returns whether the model or the data come from a function of the user's."""
    return config.model not in MODELS or (is_named(config.data) and config.data not in DATA_SOURCES)


def rehearse(setup: TrainingSetup, evaluate: Evaluation | None) -> None:
    """Evaluates one batch, draws two samples, and writes a checkpoint and the model to a temporary folder.

    The first step follows at once, so it is not tried here. Raises UserError that names what fails. Changes no weight.
    """
    model, sampler = setup.model, ModelInterface.of(setup.model).sampler
    with tempfile.TemporaryDirectory(prefix="trainer-rehearsal-") as name:
        folder = Path(name)
        parts: dict[str, Callable[[], object]] = {"checkpoint": lambda: _checkpoint(model, folder / "state")}
        if evaluate:
            parts["evaluation"] = evaluate.try_one_batch
        if sampler:
            drawn = noise(setup.config.seed, _IMAGES, sampler.latent_dim, keras.config.floatx())
            parts["sample"] = lambda: as_uint8(sampler.sample(drawn))
        parts["export"] = lambda: export(model, folder / "exported", setup.dataset.input_spec)
        for what, attempt in parts.items():
            try:
                attempt()
            except UserError:
                raise
            except Exception as error:
                raise as_user_mistake(error) or UserError(
                    f"model={setup.config.model}: its {what} fails, tried before training: {message_of(error)}"
                ) from error


def _checkpoint(model: keras.Model, folder: Path) -> None:
    refuse_unbuilt_optimizers(model)
    variables = variables_of(model)
    if not variables:
        raise UserError("the model has no variables: build its layers, or call it on some rows, before it is returned")
    write_checkpoint(folder, snapshot(variables), {"step": 0, "state": {}})
    _, values = read_checkpoint(folder)
    check_fits(variables, {name: tf.TensorShape(value.shape) for name, value in values.items()}, "checkpoint")
