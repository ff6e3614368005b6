"""Builds the model that `config.model` names. One file holds one model; the contract is in trainer/interface.py."""

import keras
import tensorflow as tf

from trainer.compat import all_layers, build_compiled
from trainer.config.train_config import MODELS, TrainConfig
from trainer.config.user_code import load_function
from trainer.data.dataset import Dataset
from trainer.distribution.gradients import sum_first
from trainer.errors import UserError
from trainer.log import log


def build_model(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Builds the model that `config.model` names, and its optimizers. Call it under the strategy's scope."""
    model = load_function(MODELS.get(config.model, config.model), "model", ("config", "dataset"))(config, dataset)
    if not isinstance(model, keras.Model):
        raise UserError(
            f"model={config.model}: the function returned {type(model).__name__}: it must return a keras.Model"
        )
    if config.jit_compile and type(model).train_step is keras.Model.train_step:
        log.warning(f"jit_compile=true: nothing of {config.model} is compiled: it uses Keras's own train_step")
    if model.compiled:
        _build_compiled(model, dataset)
    return model


def depends_on_replicas(model: keras.Model, replicas: int) -> list[str]:
    """Returns reasons, from its layers, why steps of `model` on several replicas may differ from those on one."""
    if replicas == 1:
        return []
    layers = all_layers(model)
    learning = [x for x in layers if isinstance(x, keras.layers.BatchNormalization) and x.trainable]
    norms = [x.name for x in learning if not x.synchronized]
    drawn = [x.name for x in layers if any(isinstance(y, keras.random.SeedGenerator) for y in vars(x).values())]
    reasons = []
    if norms:
        reasons.append(f"{norms[0]} normalises one replica's rows: use BatchNormalization(synchronized=True)")
    if drawn:
        reasons.append(
            f"{drawn[0]} draws its own random numbers: use trainer.models.layers.StepDropout, or current_step()"
        )
    return reasons


def _build_compiled(model: keras.Model, dataset: Dataset) -> None:
    """Builds the optimizer and the metrics now, as `fit` does: in a step it is too late."""
    images, *labels = dataset.train.gather(tf.range(1))
    images = tf.cast(images, keras.config.floatx())
    build_compiled(model, (images, *labels) if labels else images)
    sum_first(model.optimizer)
