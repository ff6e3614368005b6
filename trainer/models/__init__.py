"""Builds the model that `config.model` names. One file holds one model; the contract is in trainer/interface.py."""

import keras
import tensorflow as tf

from trainer.compat import build_compiled
from trainer.config.train_config import MODELS, TrainConfig
from trainer.config.user_code import load_function
from trainer.data.dataset import Dataset
from trainer.distribution.gradients import sum_first
from trainer.errors import UserError
from trainer.log import log
from trainer.models.layers import make_independent


def build_model(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Builds the model that `config.model` names, and its optimizers. Call it under the strategy's scope.

    Its layers draw and normalise for the global batch.
    """
    model = load_function(MODELS.get(config.model, config.model), "model")(config, dataset)
    if not isinstance(model, keras.Model):
        raise UserError(
            f"model={config.model}: the function returned {type(model).__name__}: it must return a keras.Model"
        )
    if config.jit_compile and type(model).train_step is keras.Model.train_step:
        log.warning(f"jit_compile=true: nothing of {config.model} is compiled: it uses Keras's own train_step")
    if model.compiled:
        _build_compiled(model, dataset)
    make_independent(model, config)
    return model


def _build_compiled(model: keras.Model, dataset: Dataset) -> None:
    """Builds the optimizer and the metrics now, as `fit` does: in a step it is too late."""
    images, *labels = dataset.train.gather(tf.range(1))
    images = tf.cast(images, keras.config.floatx())
    build_compiled(model, (images, *labels) if labels else images)
    sum_first(model.optimizer)
