"""python -m trainer.task --model=examples.image_and_metadata:build \
    --data=examples.image_and_metadata:data --learning_rate=3e-3 --epochs=20 \
    --evaluation_fraction=0.2 --job_dir=runs/image_and_metadata

Predicts one number from an image and from what else is known of it, two inputs by name: the size of
a ball from its picture and the distance of the camera. The pictures are generated; val_mae becomes
0.16 cm.
"""

from typing import Any

import keras
import numpy as np
from keras import layers

from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset


def data(config: TrainConfig) -> Any:
    """Returns (x, y). image: (balls, 24, 24, 1) uint8; distance: (balls, 1) in m; y: (balls,), the
    radii in cm."""
    draw = np.random.default_rng(0)
    radius = draw.uniform(2, 6, 2000)
    distance = draw.uniform(1, 3, (2000, 1))
    row, column = np.mgrid[-12:12, -12:12]
    seen = 2 * radius / distance[:, 0]  # in pixels
    images = 255 * (np.hypot(row, column) < seen[:, np.newaxis, np.newaxis])
    return {"image": images.astype(np.uint8)[..., np.newaxis], "distance": distance}, radius


def build(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Returns a compiled Keras model whose inputs have the names of x."""
    inputs = {
        "image": keras.Input((24, 24, 1), name="image"),
        "distance": keras.Input((1,), name="distance"),
    }
    x = layers.Rescaling(1 / 255)(inputs["image"])
    x = layers.Conv2D(8, 3, strides=2, activation="relu")(x)
    x = layers.Conv2D(16, 3, strides=2, activation="relu")(x)
    x = layers.Concatenate()([layers.Flatten()(x), inputs["distance"]])
    x = layers.Dense(32, activation="relu")(layers.Dense(32, activation="relu")(x))
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(config.learning_rate), loss="mse", metrics=["mae"])
    return model
