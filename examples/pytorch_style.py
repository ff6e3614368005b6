"""python -m trainer.task --model=examples.pytorch_style:build --data=examples.pytorch_style:data \
    --learning_rate=3e-3 --epochs=3 --job_dir=runs/pytorch_style

Classifies recordings that are read one at a time, by an object like PyTorch's data sets: it has a
length, and gives the example of a number. A torch.utils.data.Dataset that gives arrays or tensors
is read in the same way, by threads. The recordings are generated; val_accuracy becomes 1.0.
"""

from typing import Any

import keras
import numpy as np
from keras import layers

from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset

SAMPLES = 128


class Recordings:
    """Provides `count` recordings of a sine, a square wave or a sawtooth, with noise."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        """Returns (recording, class): (SAMPLES, 1), and 0 to 2. Where this one draws, yours would
        open a file."""
        # the same at each call: nothing is drawn without this seed
        draw = np.random.default_rng(self.first + row)
        kind = draw.integers(3)
        frequency = draw.uniform(2, 8)
        shift = draw.uniform()
        phase = (frequency * np.arange(SAMPLES) / SAMPLES + shift) % 1
        wave = (np.sin(2 * np.pi * phase), np.sign(phase - 0.5), 2 * phase - 1)[kind]
        return (wave + draw.normal(0, 0.3, SAMPLES))[:, np.newaxis].astype("float32"), kind


def data(config: TrainConfig) -> Any:
    """Returns the recordings for training and those for evaluation."""
    return Recordings(0, 4000), Recordings(4000, 1000)


def build(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Returns a compiled Keras classifier."""
    model = keras.Sequential(
        [
            keras.Input((SAMPLES, 1)),
            layers.Conv1D(16, 9, strides=2, activation="relu"),
            layers.Conv1D(32, 9, strides=2, activation="relu"),
            layers.GlobalMaxPooling1D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.Adam(config.learning_rate)
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
