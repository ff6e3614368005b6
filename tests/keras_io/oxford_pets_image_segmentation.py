"""Follows https://keras.io/examples/vision/oxford_pets_image_segmentation/: a U-Net of separable convolutions."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def network(size: tuple[int, int], classes: int) -> keras.Model:
    image = keras.Input((*size, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(32, 3, strides=2, padding="same")(image)))
    before = x
    for filters in (64, 128, 256):
        for _ in range(2):
            x = layers.SeparableConv2D(filters, 3, padding="same")(layers.ReLU()(x))
            x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        x = before = layers.add([x, layers.Conv2D(filters, 1, strides=2, padding="same")(before)])
    for filters in (256, 128, 64, 32):
        for _ in range(2):
            x = layers.Conv2DTranspose(filters, 3, padding="same")(layers.ReLU()(x))
            x = layers.BatchNormalization()(x)
        beside = layers.Conv2D(filters, 1, padding="same")(layers.UpSampling2D(2)(before))
        x = before = layers.add([layers.UpSampling2D(2)(x), beside])
    return keras.Model(image, layers.Conv2D(classes, 3, activation="softmax", padding="same")(x))


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    photos, masks = draw.random((16, 32, 32, 3), np.float32), draw.integers(0, 3, (16, 32, 32, 1), np.uint8)
    return tf.data.Dataset.from_tensor_slices((photos, masks)).batch(32)


def build(config: Any, dataset: Any) -> keras.Model:
    model = network((32, 32), classes=3)
    model.compile(keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy")
    return model
