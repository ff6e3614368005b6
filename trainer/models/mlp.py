"""Builds a dense classifier with two hidden layers of `width` units."""

import keras
from keras import layers

from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.models.classifier import compile_classifier, head
from trainer.models.model_settings import Dropout, Units


def build(config: TrainConfig, dataset: Dataset, *, width: Units = 32, dropout: Dropout = 0.0) -> keras.Model:
    """Maps (rows, image_size, image_size, channels) pixels to (rows, classes) logits; trained by Adam."""
    images = keras.Input(dataset.image_shape, name="images")
    x = layers.Flatten()(layers.Rescaling(1 / 255)(images))
    for depth in range(2):
        x = layers.Dense(width, activation="relu")(x)
        x = layers.Dropout(dropout, seed=config.seed, name=f"dropout_{depth}")(x) if dropout else x
    model = keras.Model(images, head(config, dataset)(x), name="mlp")
    return compile_classifier(model, config, dataset, keras.optimizers.Adam)
