"""Tries on a user's own model and data, before training, what a run does only after hours: evaluation, sample, save."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.base.settings.train_config import DATA_SOURCES, MODELS, TrainConfig
from trainer.data.images import as_uint8, noise, noise_and_labels
from trainer.data.sources import is_named
from trainer.invariance.sharded_slots import parts_of_others_as_zeros
from trainer.measures.evaluation import Evaluation
from trainer.run.export import export, load_template
from trainer.run.training_setup import TrainingSetup
from trainer.training.checkpoint import check_fits, read_checkpoint, snapshot, variables_of, write_checkpoint
from trainer.user_code.interface import ModelInterface
from trainer.user_code.mistakes import as_user_mistake, message_of

_ROWS = 2


def has_own_parts(config: TrainConfig) -> bool:
    """Returns whether the model or the data come from a function of the user's."""
    return config.model not in MODELS or (is_named(config.data) and config.data not in DATA_SOURCES)


def rehearse(setup: TrainingSetup, evaluate: Evaluation | None) -> None:
    """Evaluates one batch, draws two samples, writes a checkpoint and the model to a temporary folder, and loads them.

    The first step follows at once, so it is not tried here. Raises UserError that names what fails. Changes no weight.
    """
    model, interface = setup.model, ModelInterface.of(setup.model)
    with tempfile.TemporaryDirectory(prefix="trainer-rehearsal-") as name:
        folder = Path(name)
        parts: dict[str, Callable[[], object]] = {"checkpoint": lambda: _checkpoint(model, folder / "state")}
        if evaluate:
            parts["evaluation"] = evaluate.try_one_batch
        if sampler := interface.sampler:
            seed, kind = setup.config.seed, (sampler.latent_dim, keras.config.floatx())
            drawn: tuple[Any, ...] = (noise(seed, _ROWS, *kind),)
            if interface.generated_classes:
                drawn = noise_and_labels(seed, 1, range(_ROWS), *kind)
            parts["sample"] = lambda: as_uint8(sampler.sample(*drawn))
        parts["export"] = lambda: _export(setup, folder / "exported")
        for part, attempt in parts.items():
            try:
                attempt()
            except UserError:
                raise
            except Exception as error:
                raise as_user_mistake(error) or UserError(
                    f"model={setup.config.model}: its {part} fails, tried before training: {message_of(error)} "
                    "(--verbose prints the whole traceback)"
                ) from error


def _checkpoint(model: keras.Model, folder: Path) -> None:
    variables = variables_of(model)
    if not variables:
        raise UserError("the model has no variables: build its layers, or call it on some rows, before it is returned")
    write_checkpoint(folder, snapshot(variables), {"step": 0, "state": {}})
    _, values = read_checkpoint(folder)
    check_fits(variables, {name: tf.TensorShape(value.shape) for name, value in values.items()}, "checkpoint")


def _export(setup: TrainingSetup, folder: Path) -> None:
    """Writes the model, loads it on the CPU, and calls it on two rows of the data if it takes them.

    Keras saves classes that it cannot load without their code: a warning tells of a model.keras like that.
    """
    with parts_of_others_as_zeros():
        export(setup.model, folder, setup.dataset.input_spec, save_optimizer=setup.config.save_optimizer)
    x = setup.dataset.first_inputs(_ROWS)
    with tf.device("CPU:0"):
        served = tf.saved_model.load(str(folder / "saved_model"))
        inputs = _as_served(x, served.serve.input_signature)
        if inputs:
            served.serve(*inputs)
        if not (folder / "model.keras").exists():
            return
        try:
            template = load_template(folder / "model.keras", "model.keras", compiled=True)
        except UserError as error:
            log.warning(
                f"{error}: register its classes (https://keras.io/guides/serialization_and_saving/#custom-objects), or "
                "only python -m trainer.predict can load it, with the function of this run"
            )
        else:
            if inputs:
                template(x, training=False)


def _as_served(x: Any, signature: Sequence[tf.TensorSpec]) -> list[Any]:
    """Returns the tensors that the served model takes, in the order of its signature; [] if x does not hold them."""
    leaves = tf.nest.flatten(x)
    named = x if isinstance(x, dict) else {spec.name: leaf for spec, leaf in zip(signature, leaves, strict=False)}
    pairs = [(named[spec.name], spec) for spec in signature if spec.name in named]
    if len(pairs) < len(signature) or not all(spec.shape.is_compatible_with(leaf.shape) for leaf, spec in pairs):
        return []
    return [leaf if leaf.dtype == spec.dtype else tf.cast(leaf, spec.dtype) for leaf, spec in pairs]
