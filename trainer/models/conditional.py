"""Gives the networks of a GAN the class of each image, for `--conditional`.

The generator gets it by concatenation (Mirza and Osindero 2014, https://arxiv.org/abs/1411.1784): beside the noise, a
vector of zeros but for the class. As long as the noise is on average, it starts with as much influence; the network
stays a chain of layers, which one pass can run for all images of a step.

The critic gets it by projection (Miyato and Koyama 2018, https://arxiv.org/abs/1802.05637): its score is that of the
image, plus the product of the image's features with a learnt vector of the class. It has to say whether the image is
one of this class, where a class concatenated with the image may be ignored; and its convolutions run on images alone.

A generated image of an update gets the label of the real image in its row, so that nothing is drawn for labels: both
halves of a batch have the same classes, and an image between them, as WGAN-GP has, belongs to one class.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.invariance.layers import full_precision
from trainer.models.classifier import number_of_classes


def classes_of(config: TrainConfig, dataset: Dataset) -> int:
    """Returns the number of classes that a conditional GAN is given.

    Raises UserError if the data have no labels, or others than one integer from 0 for each image.
    """
    classes = number_of_classes(config, dataset, "conditional=true", "a conditional GAN")
    label = tf.nest.flatten(dataset.spec[1])[0]
    if tf.nest.is_nested(dataset.spec[1]) or label.shape.rank != 0 or not label.dtype.is_integer:
        raise UserError(f"conditional=true: examples of {config.data} are {dataset.shape}: one integer label is needed")
    labels = dataset.train.targets
    if labels is not None and not 0 <= labels.min() <= labels.max() < classes:
        raise UserError(
            f"conditional=true: {config.data} has labels from {labels.min()} to {labels.max()}, but {classes} classes: "
            f"use labels from 0 to {classes - 1}"
        )
    return classes


def with_class(noise: Any, labels: Any, classes: int) -> Any:
    """Returns what the generator's layers take: (…, latent_dim + classes), for noise (…, latent_dim) and labels (…)."""
    one_hot = tf.one_hot(labels, classes, on_value=_length(noise), off_value=0.0, dtype=noise.dtype)
    return tf.concat([noise, one_hot], -1)


def with_labels(values: Any, labels: Any) -> Any:
    """Returns what a network takes: images or noise, and their labels if it takes any; labels: (rows,) or None."""
    return values if labels is None else [values, labels]


def twice(labels: Any) -> Any:
    """Returns the labels of real and generated images, (2 x rows,), one half after the other; None of None."""
    return None if labels is None else tf.concat([labels, labels], axis=0)


def labelled(generator: keras.Model, classes: int) -> keras.Model:
    """Returns a network from noise (rows, latent_dim) and labels (rows,) to images, with the layers of `generator`.

    generator: a chain of layers that takes what `with_class` returns.
    """
    whole = {"dtype": full_precision()}
    noise = keras.Input((generator.input_shape[1] - classes,), name="noise")
    label = keras.Input((), dtype="int32", name="label")
    one_hot = layers.CategoryEncoding(classes, output_mode="one_hot", name="classes", **whole)(label)
    x = layers.Concatenate(**whole)([noise, layers.Rescaling(_length(noise), **whole)(one_hot)])
    for layer in generator.layers[1:]:  # the first is the input
        x = layer(x)
    return keras.Model([noise, label], x, name=generator.name)


def projected(features: Any, classes: int, initializer: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns the input for labels, (rows,), and what they add to the critic's score of these features: (rows, 1)."""
    whole = {"dtype": full_precision()}
    label = keras.Input((), dtype="int32", name="label")
    one_hot = layers.CategoryEncoding(classes, output_mode="one_hot", name="classes", **whole)(label)
    by_class = layers.Dense(classes, use_bias=False, name="by_class", kernel_initializer=initializer(), **whole)
    return label, layers.Dot(1, **whole)([by_class(features), one_hot])


def _length(noise: Any) -> float:
    """Returns the root mean square length of the noise of an image."""
    return float(noise.shape[-1]) ** 0.5
