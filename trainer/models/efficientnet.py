"""Builds EfficientNet classifiers from keras.applications: Tan and Le 2019,
https://arxiv.org/abs/1905.11946.

With pretrained weights the backbone runs as at inference, with fixed batch statistics: first only
the new head learns; from step `fine_tune_after_steps` on also the backbone from block
`fine_tune_from` upwards. Without weights (weights=none) the whole network learns from the first
step, with batch norm and stochastic depth over all replicas.
"""

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from trainer.base.errors import UserError, reason
from trainer.base.settings.model_settings import FROM_SCRATCH, EfficientNetConfig
from trainer.base.storage.staging import stage
from trainer.data.dataset import Dataset
from trainer.invariance.step import current_step
from trainer.models.classifiers import classifier, dropped


def build(config: EfficientNetConfig, dataset: Dataset) -> keras.Model:
    """Maps (rows, image_size, image_size, 3) pixels to (rows, classes) logits; uses Adam.

    Raises UserError if the initial weights cannot be loaded.
    """
    weights: Any = None
    if config.weights == "imagenet":
        weights = "imagenet"  # Keras downloads them
    elif config.weights != "none":
        weights = stage(config.weights, "weights", config.cache_dir)
    make = getattr(keras.applications, f"EfficientNet{config.variant}")
    try:
        backbone = make(
            include_top=False, weights=weights, input_shape=dataset.image_shape, pooling="avg"
        )
    # Keras passes on whatever is raised: no network, a wrong checksum, other shapes
    except Exception as error:
        raise UserError(
            f"weights={config.weights}: cannot be loaded for EfficientNet{config.variant}"
            f" ({reason(error)}): use the path of its weights file (made with include_top=False),"
            f" or train from scratch: {FROM_SCRATCH}"
        ) from error
    if config.weights != "none":
        _freeze_below(backbone, config.fine_tune_from)
    images = keras.Input(dataset.image_shape, name="images")
    x = backbone(images)
    later = None
    if config.fine_tune_after_steps:
        x = Gate(config.fine_tune_after_steps, name="gate")(x)
        later = (config.fine_tune_after_steps, config.fine_tune_learning_rate)
    name = f"efficientnet_{config.variant.lower()}"
    optimizer = keras.optimizers.Adam
    return classifier(images, dropped(x, config), config, dataset, name, optimizer, later)


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
    """Freezes all layers below `block`, or all, and all batch norm; switches dropout off.

    A pretrained network then runs as at inference, with fixed statistics.
    """
    names = [layer.name for layer in backbone.layers]
    blocks = list(dict.fromkeys(name.split("_")[0] for name in names if name.startswith("block")))
    if block and block not in blocks:
        raise UserError(f"fine_tune_from={block}: unknown block: use one of {', '.join(blocks)}")
    first = next(
        (i for i, name in enumerate(names) if block and name.startswith(f"{block}_")), len(names)
    )
    for index, layer in enumerate(backbone.layers):
        layer.trainable = index >= first and not isinstance(layer, layers.BatchNormalization)
        # a Functional model passes its `training` to all its layers
        if isinstance(layer, layers.Dropout):
            layer.rate = 0.0
