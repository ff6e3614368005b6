"""python -m trainer.task --model=examples.multi_label:build --data=examples.multi_label:data \
    --image_size=16 --learning_rate=3e-3 --epochs=5 --job_dir=runs/multi_label

Finds all labels that an image has, of which there may be several or none: whether a handwritten
digit is even, is prime, is written with a closed loop. The digits are those in the package; val_auc
becomes 0.98.
"""

from typing import Any

import keras
import numpy as np
from keras import layers

from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.image_arrays import load_digits

LABELS = {"even": (0, 2, 4, 6, 8), "prime": (2, 3, 5, 7), "loop": (0, 6, 8, 9)}


def data(config: TrainConfig) -> Any:
    """Returns two pairs (images, labels), for training and for evaluation. labels: (images, 3), 0
    or 1 each."""
    examples: Any = load_digits(config).train
    labels = np.stack(
        [np.isin(examples.labels, numbers) for numbers in LABELS.values()], axis=1
    ).astype("int32")
    return (examples.images[:1500], labels[:1500]), (examples.images[1500:], labels[1500:])


def build(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Returns a compiled Keras model with a probability for each label."""
    model = keras.Sequential(
        [
            keras.Input(dataset.image_shape),
            layers.Rescaling(1 / 255),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(len(LABELS), activation="sigmoid"),
        ]
    )
    by_label = keras.metrics.AUC(multi_label=True, num_labels=len(LABELS), name="auc")
    model.compile(
        keras.optimizers.Adam(config.learning_rate),
        loss="binary_crossentropy",
        metrics=["binary_accuracy", by_label],
    )
    return model
