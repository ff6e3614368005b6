"""Holds two networks with skip connections, whose memory depends on the order of their operations, and their data."""

from typing import Any

import keras
import numpy as np
from keras import layers

from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset


def masks(config: TrainConfig) -> Any:
    """Returns images (64, 64, 64, 3) uint8 and a mask of each (64, 64, 64, 1)."""
    images = np.random.default_rng(0).integers(0, 255, (64, 64, 64, 3)).astype(np.uint8)
    return images, images[..., :1] > 127


def classes(config: TrainConfig) -> Any:
    """Returns images (64, 32, 32, 3) uint8 and their classes (64,)."""
    draw = np.random.default_rng(0)
    return draw.integers(0, 255, (64, 32, 32, 3)).astype(np.uint8), draw.integers(0, 10, 64)


def _normalized(x: Any, filters: int, size: int) -> Any:
    x = layers.Conv2D(filters, size, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


def unet(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Returns a compiled U-Net of four resolutions, https://arxiv.org/abs/1505.04597"""
    images = keras.Input((64, 64, 3))
    x, skipped = layers.Rescaling(1 / 255)(images), []
    for filters in (16, 32, 64):
        x = _normalized(_normalized(x, filters, 3), filters, 3)
        skipped.append(x)
        x = layers.MaxPooling2D(2)(x)
    x = _normalized(_normalized(x, 128, 3), 128, 3)
    for filters in (64, 32, 16):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = _normalized(_normalized(layers.Concatenate()([x, skipped.pop()]), filters, 3), filters, 3)
    model = keras.Model(images, layers.Conv2D(1, 1, activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(config.learning_rate), loss="binary_crossentropy")
    return model


def densenet(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Returns a compiled DenseNet of three blocks, https://arxiv.org/abs/1608.06993"""
    images = keras.Input((32, 32, 3))
    x = layers.Conv2D(24, 3, padding="same")(layers.Rescaling(1 / 255)(images))
    for block in range(3):
        for _ in range(4):
            x = layers.Concatenate()([x, _normalized(_normalized(x, 48, 1), 12, 3)])
        x = layers.AveragePooling2D(2)(layers.Conv2D(x.shape[-1] // 2, 1)(x)) if block < 2 else x
    model = keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    model.compile(
        keras.optimizers.Adam(config.learning_rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model
