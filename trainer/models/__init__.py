"""One file per model. What the loop asks of a model is written here, and nowhere else.

A model is made by `build(config: TrainConfig, dataset: Dataset) -> keras.Model`, called under the strategy's scope,
its optimizers built there. The loop then calls the Keras `train_step(data)` in replica context, in one tf.function.

- `data` is what `fit` would give, for this replica's rows: (images, labels), or images where the source has no labels.
  A model with the attribute `batches_per_step = n` gets images alone, (n, rows, height, width, channels): n global
  batches a step. Pixels arrive as the source holds them (0 to 255 for every source here), cast to floatx.
- `train_step` returns a dict of scalars, already divided by the GLOBAL batch: the loop sums them over replicas. A
  compiled Keras model returns its metrics instead, and the loop reads those over all replicas.
- Randomness, rows and means come from `trainer.distribution.step.current_step()`; gradients are applied by
  an optimizer from `trainer.distribution.gradients.sum_and_build`, or by a compiled model's own.

Optional, used where they are there:
- `templates() -> dict[name, keras.Model]`: what is saved, the one named "model" first (default: the model itself);
- `serve(outputs)`: the template's outputs as a served model should give them (default: as they are);
- `sample(noise) -> uint8 (count, height, width, channels)` and `latent_dim`: sample grids from fixed noise,
  (count, latent_dim) in floatx;
- `averaged_generator() -> keras.Model` and `latent_dim`: FID and KID, of images in [-1, 1] that this network makes of
  (rows, latent_dim) noise. It is the same network at each call, with its weights of now.
"""

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
