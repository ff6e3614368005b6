"""Builds the model that `config.model` names. One file holds one model; the contract is in trainer/interface.py."""

import keras
import tensorflow as tf

from trainer.config.train_config import MODELS, TrainConfig
from trainer.config.user_code import load_function
from trainer.data.dataset import Dataset
from trainer.distribution.gradients import sum_first
from trainer.errors import UserError
from trainer.log import log


def build_model(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """The model that `config.model` names, its optimizers built. Call it under the strategy's scope."""
    model = load_function(MODELS.get(config.model, config.model), "model")(config, dataset)
    if not isinstance(model, keras.Model):
        raise UserError(f"model={config.model}: it returned {type(model).__name__}, not a keras.Model")
    if config.jit_compile and type(model).train_step is keras.Model.train_step:
        log.warning(f"jit_compile=true: nothing of {config.model} is compiled: Keras's own train_step is run as it is")
    if model.compiled:
        _build_compiled(model, dataset)
    return model


def depends_on_replicas(model: keras.Model, replicas: int) -> list[str]:
    """Why steps of `model` on several replicas may differ from those on one, as far as its layers show it."""
    if replicas == 1:
        return []
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Layer)]
    learning = [x for x in layers if isinstance(x, keras.layers.BatchNormalization) and x.trainable]  # others are fixed
    norms = [x.name for x in learning if not x.synchronized]
    drawn = [x.name for x in layers if any(isinstance(y, keras.random.SeedGenerator) for y in vars(x).values())]
    reasons = []
    if norms:
        reasons.append(f"{norms[0]} normalises one replica's rows: say BatchNormalization(synchronized=True)")
    if drawn:
        reasons.append(
            f"{drawn[0]} draws random numbers of its own: use trainer.models.layers.StepDropout, or current_step()"
        )
    return reasons


def _build_compiled(model: keras.Model, dataset: Dataset) -> None:
    """Makes the variables of a compiled model's optimizer and metrics now, as `fit` does: in a step it is too late."""
    images, *labels = dataset.train.gather(tf.range(1))
    images = tf.cast(images, keras.config.floatx())
    model._symbolic_build(data_batch=(images, *labels) if labels else images)
    sum_first(model.optimizer)
