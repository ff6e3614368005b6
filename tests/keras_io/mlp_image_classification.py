"""Follows https://keras.io/examples/vision/mlp_image_classification/: the MLP-Mixer on patches of augmented images."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

SIZE, PATCH, WIDTH, CLASSES = 64, 8, 32, 100
PATCHES = (SIZE // PATCH) ** 2


class Patches(layers.Layer):
    def __init__(self, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = size

    def call(self, images: Any) -> Any:
        patches = ops.image.extract_patches(images, self.size)
        return ops.reshape(patches, (ops.shape(images)[0], PATCHES, 3 * self.size**2))


class MixerLayer(layers.Layer):
    def __init__(self, patches: int, hidden: int, rate: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mlps = [
            keras.Sequential([layers.Dense(units, "gelu"), layers.Dense(units), layers.Dropout(rate)])
            for units in (patches, hidden)
        ]
        self.normalize = layers.LayerNormalization(epsilon=1e-6)

    def build(self, shape: Any) -> None:
        self.built = True

    def call(self, inputs: Any) -> Any:
        channels = ops.transpose(self.normalize(inputs), (0, 2, 1))
        x = ops.transpose(self.mlps[0](channels), (0, 2, 1)) + inputs
        return x + self.mlps[1](self.normalize(x))


def network(images: Any) -> keras.Model:
    augment = keras.Sequential([
        layers.Normalization(), layers.Resizing(SIZE, SIZE), layers.RandomFlip("horizontal"),
        layers.RandomZoom(height_factor=0.2, width_factor=0.2),
    ])  # fmt: skip
    augment.layers[0].adapt(images)
    inputs = keras.Input((32, 32, 3))
    x = layers.Dense(WIDTH)(Patches(PATCH)(augment(inputs)))
    x = keras.Sequential([MixerLayer(PATCHES, WIDTH, 0.2) for _ in range(2)])(x)
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (64, 32, 32, 3)).astype("float32"), draw.integers(0, CLASSES, (64, 1))


def build(config: Any, dataset: Any) -> keras.Model:
    model = network(data(config)[0])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(learning_rate=0.005), loss, metrics=[
        keras.metrics.SparseCategoricalAccuracy(name="acc"),
        keras.metrics.SparseTopKCategoricalAccuracy(5, name="top5-acc"),
    ])  # fmt: skip
    return model
