"""Makes mistakes in code of a user: each function of tests named by dotted path makes one, at a
line that names it."""

from typing import Any

import numpy as np
import tensorflow as tf
from keras import Input, Model, Sequential, callbacks, layers, metrics

from tests import models
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset


def in_build(config: TrainConfig, dataset: Dataset) -> Model:
    return Sequential([layers.Dense(3, activation="rleu")])  # in_build


def takes_one(config: TrainConfig) -> Model:
    return Sequential()


class _Layer(layers.Layer):
    def call(self, inputs: Any) -> Any:
        return tf.matmul(inputs, tf.zeros((2, 10)))  # in_layer

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], 10)


def in_layer(config: TrainConfig, dataset: Dataset) -> Model:
    inputs = Input(dataset.image_shape)
    model = Model(inputs, _Layer()(layers.Flatten()(inputs)))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


@tf.function
def _rewritten(images: Any) -> Any:
    total = 0.0
    for _ in tf.range(3):
        total += {"a": 1.0}["b"]  # in_graph
    return total


def in_graph(config: TrainConfig, dataset: Dataset) -> Model:
    return models.Steps(lambda step, data: _rewritten(data[0]))


def _of_numpy(images: Any) -> Any:
    return images.reshape(3)  # in_python_function


def in_python_function(config: TrainConfig, dataset: Dataset) -> Model:
    return models.Steps(
        lambda step, data: tf.reduce_mean(tf.numpy_function(_of_numpy, data[:1], tf.float32))
    )


def _checked(images: Any) -> Any:
    tf.debugging.assert_less(tf.reduce_max(images), -1.0, "too bright")  # in_operation
    return tf.reduce_mean(images)


def in_operation(config: TrainConfig, dataset: Dataset) -> Model:
    return models.Steps(lambda step, data: _checked(data[0]))


def in_data(config: TrainConfig) -> Dataset:
    return np.zeros(3)[5]  # in_data


def in_opening(config: TrainConfig) -> Any:
    return np.load("nowhere.npz")  # in_opening


class _Callback(callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise RuntimeError("no room\nfor a second line")  # in_callback


def in_callback() -> list[callbacks.Callback]:
    return [_Callback()]


class Misread(models.Subclassed):
    def get_config(self) -> dict[str, Any]:
        return {"width": self.width}  # in_get_config


def in_get_config(config: TrainConfig, dataset: Dataset) -> Model:
    return models.called(Misread(), dataset)


def stops_on_what_is_not_evaluated() -> list[callbacks.Callback]:
    return [callbacks.EarlyStopping("val_los")]


AT_IMPORT = Sequential([Input((16, 16, 1)), layers.Flatten(), layers.Dense(10)])


def at_import(config: TrainConfig, dataset: Dataset) -> Model:
    return models.called(AT_IMPORT, dataset)


def numbers_to_7(config: TrainConfig) -> list[Any]:
    """Gives rows of one number, which is also the class: the last is 7."""
    numbers = np.arange(64, dtype=np.int32) % 4
    numbers[-1] = 7
    return [(np.full(1, number), number) for number in numbers]


def embeds(config: TrainConfig, dataset: Dataset) -> Model:
    parts = [layers.Embedding(5, 2), layers.Flatten(), layers.Dense(8)]
    return models.compiled(Sequential([Input((1,), dtype="int32"), *parts]))


def measures_top_5(config: TrainConfig, dataset: Dataset) -> Model:
    """Has a metric that TensorFlow does not compute in float64."""
    return models.compiled(
        models.classifier(config, dataset), metrics=[metrics.SparseTopKCategoricalAccuracy(5)]
    )
