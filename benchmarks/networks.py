"""Holds networks that a user would bring, with random data: ResNet-50, a UNet, a DenseNet and a
transformer."""

from typing import Any

import keras
import numpy as np

from trainer.base.settings.train_config import TrainConfig

CLASSES = 10
WORDS = 8_000
ROWS = 1_024


def photos(config: TrainConfig, *, size: int = 224) -> Any:
    """Returns images (ROWS, size, size, 3) uint8 and class numbers (ROWS,)."""
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (ROWS, size, size, 3), np.uint8), draw.integers(
        0, CLASSES, ROWS, np.int32
    )


def masks(config: TrainConfig, *, size: int = 128) -> Any:
    """Returns images (ROWS, size, size, 3) uint8 and a class number for each pixel (ROWS, size,
    size)."""
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (ROWS, size, size, 3), np.uint8), draw.integers(
        0, 3, (ROWS, size, size), np.int32
    )


def sentences(config: TrainConfig, *, length: int = 256) -> Any:
    """Returns word numbers (ROWS, length) and class numbers (ROWS,)."""
    draw = np.random.default_rng(0)
    return draw.integers(0, WORDS, (ROWS, length), np.int32), draw.integers(
        0, CLASSES, ROWS, np.int32
    )


def resnet50(config: TrainConfig, dataset: Any, *, size: int = 224) -> keras.Model:
    """Returns ResNet-50 (He et al. 2015, arXiv:1512.03385) without pretrained weights."""
    images = keras.Input((size, size, 3))
    network = keras.applications.ResNet50(
        weights=None, classes=CLASSES, classifier_activation=None, input_shape=(size, size, 3)
    )
    return _compiled(keras.Model(images, network(keras.layers.Rescaling(1 / 255)(images))), config)


def unet(config: TrainConfig, dataset: Any, *, size: int = 128, filters: int = 32) -> keras.Model:
    """Returns a UNet (Ronneberger et al. 2015, arXiv:1505.04597) with batch norm and four
    resolutions."""
    images = keras.Input((size, size, 3))
    x = keras.layers.Rescaling(1 / 255)(images)
    skipped = []
    for level in range(3):
        x = _two_convolutions(x, filters * 2**level)
        skipped.append(x)
        x = keras.layers.MaxPooling2D()(x)
    x = _two_convolutions(x, filters * 8)
    for level in reversed(range(3)):
        x = keras.layers.Conv2DTranspose(filters * 2**level, 2, strides=2)(x)
        x = _two_convolutions(keras.layers.Concatenate()([x, skipped[level]]), filters * 2**level)
    return _compiled(keras.Model(images, keras.layers.Conv2D(3, 1)(x)), config)


def densenet(config: TrainConfig, dataset: Any, *, size: int = 224) -> keras.Model:
    """Returns a DenseNet (Huang et al. 2016, arXiv:1608.06993) of three blocks."""
    images = keras.Input((size, size, 3))
    x = keras.layers.Conv2D(24, 3, padding="same")(keras.layers.Rescaling(1 / 255)(images))
    for block in range(3):
        for _ in range(4):
            x = keras.layers.Concatenate()([x, _convolution(_convolution(x, 48, 1), 12, 3)])
        x = (
            keras.layers.AveragePooling2D(2)(keras.layers.Conv2D(x.shape[-1] // 2, 1)(x))
            if block < 2
            else x
        )
    scores = keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling2D()(x))
    return _compiled(keras.Model(images, scores), config)


def transformer(
    config: TrainConfig,
    dataset: Any,
    *,
    length: int = 256,
    width: int = 256,
    blocks: int = 4,
    heads: int = 8,
) -> keras.Model:
    """Returns a transformer encoder (Vaswani et al. 2017, arXiv:1706.03762) that classifies
    sentences."""
    words = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(WORDS, width)(words)
    for _ in range(blocks):
        attended = keras.layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        hidden = keras.layers.Dense(width)(keras.layers.Dense(4 * width, "gelu")(x))
        x = keras.layers.LayerNormalization()(x + hidden)
    return _compiled(
        keras.Model(words, keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling1D()(x))),
        config,
    )


def _two_convolutions(x: Any, filters: int) -> Any:
    return _convolution(_convolution(x, filters, 3), filters, 3)


def _convolution(x: Any, filters: int, size: int) -> Any:
    x = keras.layers.Conv2D(filters, size, padding="same", use_bias=False)(x)
    return keras.layers.ReLU()(keras.layers.BatchNormalization()(x))


def _compiled(model: keras.Model, config: TrainConfig) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(config.learning_rate), loss, metrics=["accuracy"])
    return model
