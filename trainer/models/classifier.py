"""Provides the last layer, the loss and the compilation that classifiers share, for any number of replicas."""

from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from trainer.config.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.errors import UserError
from trainer.models.layers import full_precision
from trainer.models.optimizers import learning_rate


def head(config: TrainConfig, dataset: Dataset) -> keras.layers.Layer:
    """Returns the last layer, one logit per class; raises UserError if the data has no labels or only one class."""
    classes = number_of_classes(config, dataset, f"model={config.model}", "a classifier")
    return layers.Dense(classes, dtype=full_precision(), name="logits")


def number_of_classes(config: TrainConfig, dataset: Dataset, setting: str, kind: str) -> int:
    """Returns the number of classes of the data, which this kind of model needs, by this setting.

    Raises UserError if the data has no labels or only one class.
    """
    if not dataset.labelled:
        raise UserError(f"{setting}: {config.data} has no labels: {kind} needs them, e.g. class folders")
    classes = len(dataset.class_names)
    if not classes:
        raise UserError(f"{setting}: {config.data} has labels but no class_names: set them in its Dataset")
    if classes < 2:
        raise UserError(f"{setting}: {config.data} has only one class ({dataset.class_names[0]}): two are required")
    return classes


def compile_classifier(
    model: keras.Model, config: TrainConfig, dataset: Dataset, optimizer: Callable[[Any], Any]
) -> keras.Model:
    """Compiles `model` with cross-entropy, accuracy and the optimizer at the run's learning rate, and returns it."""
    model.compile(
        optimizer(learning_rate(config, dataset)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return model
