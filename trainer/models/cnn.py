"""Builds a convolutional classifier: two convolutions, pooling, three convolutions, pooling, a dense layer of 128.

At width 128 it is the MNIST network of an article on training with several cloud GPUs, with the same RMSprop.
"""

import keras
from keras import layers

from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.models.classifier import compile_classifier, head
from trainer.models.model_settings import Dropout, Width


def build(config: TrainConfig, dataset: Dataset, *, width: Width = 32, dropout: Dropout = 0.0) -> keras.Model:
    """Maps (rows, image_size, image_size, channels) pixels to (rows, classes) logits; trained by RMSprop."""
    images = keras.Input(dataset.image_shape, name="images")
    x = layers.Rescaling(1 / 255)(images)
    for count in (2, 3):
        for _ in range(count):
            x = layers.Conv2D(width, 3, activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    x = layers.Dropout(dropout, seed=config.seed, name="dropout")(x) if dropout else x
    model = keras.Model(images, head(config, dataset)(x), name="cnn")
    return compile_classifier(model, config, dataset, keras.optimizers.RMSprop)
