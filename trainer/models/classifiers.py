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
from trainer.models.learning_rates import learning_rate


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


def dropped(x: Any, config: Any, name: str = "dropout") -> Any:
    """Returns features, some of which training drops if the settings ask for it."""
    if not config.dropout:
        return x
    return layers.Dropout(config.dropout, seed=config.seed, name=name)(x)


def classifier(
    images: Any,
    features: Any,
    config: TrainConfig,
    dataset: Dataset,
    name: str,
    optimizer: Callable[[Any], Any],
    later: tuple[int, float] | None = None,
) -> keras.Model:
    """Returns a model with a logit per class, cross-entropy, accuracy and the run's learning rate.

    later: (step, the learning rate from that step on). Raises UserError if the data have no labels
    or only one class.
    """
    classes = number_of_classes(config, dataset, f"model={config.model}", "a classifier")
    logits = layers.Dense(classes, dtype=full_precision(), name="logits")(features)
    model = keras.Model(images, logits, name=name)

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
        x = dropped(x, config, f"dropout_{depth}")
    return classifier(images, x, config, dataset, "mlp", keras.optimizers.Adam)


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
    x = dropped(layers.Dense(128, activation="relu")(layers.Flatten()(x)), config)
    return classifier(images, x, config, dataset, "cnn", keras.optimizers.RMSprop)
