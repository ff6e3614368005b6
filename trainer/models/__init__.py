"""Builds models, one file per model, and defines what the training loop requires of a model.

A model is built by `build(config: TrainConfig, dataset: Dataset) -> keras.Model`, called under the strategy's scope,
which also builds its optimizers. The loop then calls the Keras `train_step(data)` in replica context, in a tf.function.

- `data` is what `fit` would pass, for this replica's rows: (images, labels), or images if the source has no labels.
  A model with the attribute `batches_per_step = n` gets only images, (n, rows, height, width, channels): n global
  batches per step. Pixels have the values of the source (0 to 255 for every source here), cast to floatx.
- `train_step` returns a dict of scalars, already divided by the GLOBAL batch: the loop sums them over replicas. A
  compiled Keras model returns its metrics instead, which the loop reads over all replicas.
- Randomness, rows and means come from `trainer.distribution.step.current_step()`; gradients are applied by an
  optimizer from `trainer.distribution.gradients.sum_and_build`, or by the optimizer of a compiled model.

Optional attributes:
- `templates() -> dict[name, keras.Model]`: the models to save, the one named "model" first (default: the model itself);
- `serve(outputs)`: converts the template's outputs for serving (default: unchanged);
- `sample(noise) -> uint8 (count, height, width, channels)` and `latent_dim`: make sample grids from fixed noise,
  (count, latent_dim) in floatx;
- `averaged_generator() -> keras.Model` and `latent_dim`: make the images in [-1, 1] for FID and KID from
  (rows, latent_dim) noise. Each call returns the same network, with its current weights.
"""

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
    model = load_function(MODELS.get(config.model, config.model), "model")(config, dataset)
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
