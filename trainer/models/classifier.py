"""What classifiers share: logits, loss, and a compiled Keras model whose numbers do not depend on replicas."""

from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from trainer.config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.errors import UserError
from trainer.models.layers import full_precision
from trainer.models.optimizers import learning_rate


def head(config: TrainConfig, dataset: Dataset) -> keras.layers.Layer:
    """The last layer: one logit a class. UserError where the data has no labels or one class only."""
    if not dataset.train.labelled:
        raise UserError(
            f"model={config.model}: {config.data} has no labels: a classifier needs them (class folders, say)"
        )
    classes = len(dataset.class_names)
    if classes < 2:
        raise UserError(
            f"model={config.model}: {config.data} has one class only ({dataset.class_names[0]}): two are needed"
        )
    return layers.Dense(classes, dtype=full_precision(), name="logits")


def compile_classifier(
    model: keras.Model, config: TrainConfig, dataset: Dataset, optimizer: Callable[[Any], Any]
) -> keras.Model:
    """`model` with sparse cross-entropy from logits, accuracy, and the optimizer at the run's learning rate."""
    model.compile(
        optimizer(learning_rate(config, dataset)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return model
