"""Builds the dense and the convolutional classifier, and what all classifiers share: last layer,
loss, compilation.

They are plain compiled Keras models, whose results
do not depend on the number of replicas.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from trainer.base.errors import UserError
from trainer.base.settings.model_settings import CNNConfig, MLPConfig
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.invariance.layers import full_precision
from trainer.models.optimizers import learning_rate


def head(config: TrainConfig, dataset: Dataset) -> keras.layers.Layer:
    """Returns the last layer, one logit per class, or raises UserError without two classes."""
    classes = number_of_classes(config, dataset, f"model={config.model}", "a classifier")
    return layers.Dense(classes, dtype=full_precision(), name="logits")


def number_of_classes(config: TrainConfig, dataset: Dataset, setting: str, kind: str) -> int:
    """Returns the number of classes of the data.

    Raises UserError if there are no labels, or fewer than two classes; it names `setting` and the
    `kind` of model.
    """
    classes = len(dataset.class_names)
    data = f"{setting}: {config.data}"
    if not dataset.train.labelled:
        raise UserError(f"{data} has no labels: {kind} needs them, e.g. class folders")
    if not classes:
        raise UserError(f"{data} has labels but no class_names: set them in its Dataset")
    if classes < 2:
        raise UserError(
            f"{data} has only one class ({''.join(dataset.class_names)}): two are required"
        )
    return classes


def compile_classifier(
    model: keras.Model,
    config: TrainConfig,
    dataset: Dataset,
    optimizer: Callable[[Any], Any],
    later: tuple[int, float] | None = None,
) -> keras.Model:
    """Compiles `model` with cross-entropy, accuracy and the optimizer, and returns it.

    later: (step, the learning rate from that step on).
    """

    def arguments(rate: Any) -> dict[str, Any]:
        return {
            "optimizer": optimizer(rate),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        }

    model.compile(**arguments(learning_rate(config, dataset, later=later)))
    # The saved model is compiled with a constant rate, so that it loads without this package.
    model.plain_compile = lambda: arguments(config.learning_rate)
    return model


def mlp(config: MLPConfig, dataset: Dataset) -> keras.Model:
    """Maps (rows, image_size, image_size, channels) to (rows, classes) by two hidden layers."""
    images = keras.Input(dataset.image_shape, name="images")
    x = layers.Flatten()(layers.Rescaling(1 / 255)(images))
    for depth in range(2):
        x = layers.Dense(config.width, activation="relu")(x)
        if config.dropout:
            x = layers.Dropout(config.dropout, seed=config.seed, name=f"dropout_{depth}")(x)
    model = keras.Model(images, head(config, dataset)(x), name="mlp")
    return compile_classifier(model, config, dataset, keras.optimizers.Adam)


def cnn(config: CNNConfig, dataset: Dataset) -> keras.Model:
    """Maps pixels to logits by 2 convolutions, pooling, 3 convolutions, pooling, 128 units.

    At width 128 it is the MNIST network of an article on training with several cloud GPUs, with the
    same RMSprop.
    """
    images = keras.Input(dataset.image_shape, name="images")
    x = layers.Rescaling(1 / 255)(images)
    for count in (2, 3):
        for _ in range(count):
            x = layers.Conv2D(config.width, 3, activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    if config.dropout:
        x = layers.Dropout(config.dropout, seed=config.seed, name="dropout")(x)
    model = keras.Model(images, head(config, dataset)(x), name="cnn")
    return compile_classifier(model, config, dataset, keras.optimizers.RMSprop)
