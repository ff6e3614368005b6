"""Builds EfficientNet classifiers from keras.applications: Tan and Le 2019, https://arxiv.org/abs/1905.11946.

With pretrained weights the backbone runs as at inference, with fixed batch statistics: first only the new head learns;
from step `fine_tune_after_steps` on also the backbone from block `fine_tune_from` upwards. Without weights
(weights=none) the whole network learns from the first step, with batch norm and stochastic depth over all replicas.
"""

from typing import Annotated, Any, Literal

import keras
import tensorflow as tf
from keras import layers

from trainer.base.errors import UserError, reason
from trainer.base.settings.fields import Setting
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage.staging import stage
from trainer.data.dataset import Dataset
from trainer.invariance.step import current_step
from trainer.models.classifiers import compile_classifier, head
from trainer.models.model_settings import FROM_SCRATCH, Dropout


def build(
    config: TrainConfig,
    dataset: Dataset,
    *,
    variant: Annotated[Literal["B0", "B1", "B2", "B3", "B4", "B5", "B6", "B7"], "variant of EfficientNet"] = "B2",
    weights: Annotated[
        str, Setting("initial weights of EfficientNet: imagenet, none, or a weights file", reads=True)
    ] = "imagenet",
    dropout: Dropout = 0.0,
    fine_tune_from: Annotated[
        str, "first block of EfficientNet to train, as block6a; none: only the head is trained"
    ] = "",
    fine_tune_after_steps: Annotated[
        int, Setting("steps in which only EfficientNet's head is trained", unit="steps", minimum=0)
    ] = 0,
    fine_tune_learning_rate: Annotated[float, Setting("learning_rate from fine_tune_after_steps on", above=0)] = 1e-5,
) -> keras.Model:
    """Maps (rows, image_size, image_size, 3) pixels to (rows, classes) logits; uses Adam.

    Raises UserError if the initial weights cannot be loaded.
    """
    named = {"imagenet": "imagenet", "none": None}
    file = named[weights] if weights in named else stage(weights, "weights", config.cache_dir)
    make, shape = getattr(keras.applications, f"EfficientNet{variant}"), (config.image_size, config.image_size, 3)
    try:
        backbone = make(include_top=False, weights=file, input_shape=shape, pooling="avg")
    except Exception as error:  # Keras passes on whatever is raised: no network, a wrong checksum, other shapes
        raise UserError(
            f"weights={weights}: cannot be loaded for EfficientNet{variant} ({reason(error)}): use the "
            f"path of its weights file (made with include_top=False), or train from scratch: {FROM_SCRATCH}"
        ) from error
    if weights != "none":
        _freeze_below(backbone, fine_tune_from)
    images = keras.Input(dataset.image_shape, name="images")
    x = backbone(images)
    x = Gate(fine_tune_after_steps, name="gate")(x) if fine_tune_after_steps else x
    x = layers.Dropout(dropout, seed=config.seed, name="dropout")(x) if dropout else x
    model = keras.Model(images, head(config, dataset)(x), name=f"efficientnet_{variant.lower()}")
    later = (fine_tune_after_steps, fine_tune_learning_rate) if fine_tune_after_steps else None
    return compile_classifier(model, config, dataset, keras.optimizers.Adam, later)


class Gate(keras.layers.Layer):
    """Blocks gradients before step `opens_at`: the layers below do not learn until then."""

    def __init__(self, opens_at: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.opens_at = opens_at

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the inputs unchanged."""
        if not training:
            return inputs
        is_open = tf.cast(current_step().step >= self.opens_at, inputs.dtype)
        return is_open * inputs + (1 - is_open) * tf.stop_gradient(inputs)

    def plain(self) -> keras.layers.Layer:
        """Returns the layer that a template has instead."""
        return layers.Identity(name=self.name)


def _freeze_below(backbone: keras.Model, block: str) -> None:
    """Freezes all layers below `block`, or all if it is empty, and all batch norm, and switches dropout off.

    A pretrained network then runs as at inference, with fixed statistics.
    """
    names = [layer.name for layer in backbone.layers]
    blocks = list(dict.fromkeys(name.split("_")[0] for name in names if name.startswith("block")))
    if block and block not in blocks:
        raise UserError(f"fine_tune_from={block}: unknown block: use one of {', '.join(blocks)}")
    first = next((i for i, name in enumerate(names) if block and name.startswith(f"{block}_")), len(names))
    for index, layer in enumerate(backbone.layers):
        layer.trainable = index >= first and not isinstance(layer, layers.BatchNormalization)
        if isinstance(layer, layers.Dropout):  # a Functional model passes its `training` to all its layers
            layer.rate = 0.0
