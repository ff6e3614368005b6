"""Small models and callbacks that tests name by dotted path, as a user would."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from keras import Input, Model, Sequential, Variable, callbacks, layers, losses, optimizers

from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import read_cluster
from trainer.data.dataset import Arrays, Dataset
from trainer.invariance.gradients import sum_and_build
from trainer.training.checkpoint import variables_of


def classifier(config: TrainConfig, dataset: Dataset) -> Model:
    """Returns a stock compiled Keras classifier."""
    model = _network(dataset, layers.Dense(16, activation="relu"), classes=len(dataset.class_names))
    return compiled(model, optimizers.Adam(config.learning_rate), metrics=["accuracy"])


def compiled(model: Model, optimizer: Any = "adam", **given: Any) -> Model:
    """Compiles a classifier that returns logits."""
    model.compile(optimizer, losses.SparseCategoricalCrossentropy(from_logits=True), **given)
    return model


def _network(dataset: Dataset, *hidden: layers.Layer, classes: int = 10) -> Sequential:
    flat = [
        Input(dataset.image_shape),
        layers.Rescaling(1 / 255),
        layers.Flatten(),
    ]
    return Sequential([*flat, *hidden, layers.Dense(classes)])


class Steps(Model):
    """Returns `loss(number of the step, from 1, its data)` as the loss of a step, and can be
    exported."""

    def __init__(self, loss: Any) -> None:
        super().__init__(name="steps")
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="float32", name="count")
        self.loss_of = loss
        self.built = True

    def get_config(self) -> dict[str, Any]:
        return {}

    def call(self, images: Any) -> Any:
        return images

    def train_step(self, data: Any) -> dict[str, Any]:
        return {"loss": self.loss_of(self.count.assign_add(1.0), data)}


def hungry(config: TrainConfig, dataset: Dataset) -> Model:
    """Asks for 640,000 TB, more than any machine can address."""
    side = 400_000_000
    return Steps(
        lambda step, data: tf.reduce_sum(tf.random.uniform([side + tf.reduce_sum(data[1]) * 0] * 2))
    )


def not_a_model(config: TrainConfig, dataset: Dataset) -> str:
    return "model"


HEARD: list[tuple[str, int]] = []


class FirstWeights(callbacks.Callback):
    """Sets the weights of the first epoch in the end, as EarlyStopping(restore_best_weights=True)
    may."""

    after_epoch: Any = staticmethod(lambda epoch: None)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not hasattr(self, "first"):
            self.first = self.model.get_weights()
        self.after_epoch(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        HEARD.append(("train_end", len(self.first)))
        self.model.set_weights(self.first)


def first_weights(config: TrainConfig) -> list[Any]:
    assert config.job_dir
    return [FirstWeights()]


class _StopAt(callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch >= 2:  # the third
            self.model.stop_training = True


def stop_at_3() -> list[callbacks.Callback]:
    return [_StopAt()]


def by_schedule() -> list[callbacks.Callback]:
    return [callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)]


class _WriteVariables(callbacks.Callback):
    def on_train_end(self, logs: Any = None) -> None:
        if hasattr(self.model, "averaged_generator"):
            # gets its batch statistics where it is used, else on the chief alone
            self.model.averaged_generator()
        copies: dict[str, Any] = {}
        for name, variable in variables_of(self.model).items():
            held = variable.value if isinstance(variable, Variable) else variable
            copies[name] = np.stack([np.asarray(copy) for copy in getattr(held, "values", (held,))])
        np.savez(
            Path(os.environ["TRAINER_TEST_VARIABLES"]) / f"{read_cluster().index}.npz", **copies
        )


def write_variables() -> list[callbacks.Callback]:
    """At the end each worker leaves its variables, (devices, …) each, in a file of
    TRAINER_TEST_VARIABLES.

    A CSVLogger would leave a file for each process, but only the chief runs it.
    """
    return [
        _WriteVariables(),
        callbacks.CSVLogger(f"{os.environ['TRAINER_TEST_VARIABLES']}/{os.getpid()}.csv"),
    ]


def not_callbacks() -> int:
    return 3


class _MeanLoss(Model):
    """Divides by the rows of one replica, as tutorials do."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__()
        self.network = Sequential([Input(dataset.image_shape), layers.Conv2D(1, 3, padding="same")])
        self.adam = sum_and_build(
            optimizers.Adam(1e-3), self.network.trainable_variables, "float32"
        )

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.network(data[0] / 255)))
        variables = [variable.value for variable in self.network.trainable_variables]
        self.adam.apply(tape.gradient(loss, variables), self.network.trainable_variables)
        return {"loss": loss}


def mean_loss(config: TrainConfig, dataset: Dataset) -> Model:
    return _MeanLoss(dataset)


def own_batch_norm(config: TrainConfig, dataset: Dataset) -> Model:
    return compiled(_network(dataset, layers.Dense(8), layers.BatchNormalization()))


def mixed_rows(config: TrainConfig, dataset: Dataset) -> Model:
    """Returns a classifier that mixes the images of a batch, which no replica can do alone."""
    parts = [layers.MixUp(), layers.Flatten(), layers.Dense(10)]
    return compiled(Sequential([Input(dataset.image_shape), *parts]))


class Tower(layers.Layer):
    """Has layers of the same names in each tower, and a recurrent cell, which may drop values."""

    def __init__(self, cell: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows = layers.TimeDistributed(layers.Dropout(0.2, name="drop"), name="rows")
        self.loop = layers.RNN(cell, unroll=True, name="loop")

    def call(self, values: Any, training: bool = False) -> Any:
        return self.loop(self.rows(values, training=training), training=training)


class Stock(Model):
    """Holds stock layers that draw or normalise, as a user would put them into a model of their
    own."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        parts = layers
        self.augment = [
            parts.RandomFlip("horizontal"),
            parts.RandomCrop(3, 3),
            parts.Resizing(3, 3),
        ]
        self.embed = parts.Embedding(17, 4)
        self.towers = [
            Tower(parts.LSTMCell(6, dropout=0.2, recurrent_dropout=0.3), name="tower"),
            Tower(parts.LSTMCell(6), name="tower"),
        ]
        self.attend = parts.MultiHeadAttention(2, 4, dropout=0.2, use_bias=False)
        self.norm = parts.BatchNormalization()
        self.shared = parts.Dropout(0.4)
        self.noise = parts.GaussianNoise(0.1)
        self.out = parts.Dense(classes)

    def call(self, images: Any, training: bool = False) -> Any:
        for layer in self.augment:
            images = layer(images, training=training)
        pixels = tf.cast(tf.clip_by_value(images[..., 0] / 16, 0, 16), tf.int32)  # (rows, 3, 3)
        windows = tf.reshape(self.embed(pixels), (-1, 3, 3 * 4))
        windows = self.attend(windows, windows, training=training)
        towers = [
            self.shared(tower(windows, training=training), training=training)
            for tower in self.towers
        ]
        noisy = [self.noise(tower, training=training) for tower in towers]
        # two parts of each row, one after the other
        normed = self.norm(tf.concat(noisy, axis=0), training=training)
        return self.out(tf.concat(tf.split(normed, 2), axis=1))


def stock_layers(config: TrainConfig, dataset: Dataset) -> Model:
    model = Stock(len(dataset.class_names))
    model(tf.zeros((1, *dataset.image_shape)))
    return compiled(model, optimizers.Adam(config.learning_rate), metrics=["accuracy"])


class Subclassed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(10)

    def call(self, images: Any, training: bool = False) -> Any:
        return self.dense(tf.reshape(images, (tf.shape(images)[0], 16 * 16)) / 255)


def called(model: Model, dataset: Dataset) -> Model:
    """Builds a classifier by calling it, and compiles it."""
    model(tf.zeros((1, *dataset.image_shape)))
    return compiled(model)


def subclassed(config: TrainConfig, dataset: Dataset) -> Model:
    return called(Subclassed(), dataset)


def diverging(config: TrainConfig, dataset: Dataset) -> Model:
    """Its loss is NaN from the third step on where the learning rate is above 0.03, and the rate
    elsewhere."""
    rate = config.learning_rate
    return Steps(lambda step, data: tf.where((step >= 3.0) & (rate > 0.03), np.nan, rate))


def data_of_worker(config: TrainConfig) -> Dataset:
    """Returns other images on worker 1."""
    images = np.zeros((64, config.image_size, config.image_size, config.channels), np.uint8)
    images[7:] = 3 * (read_cluster().index == 1)
    return Dataset(
        config.data, Arrays(images, np.arange(64, dtype=np.int32) % 2), class_names=("one", "other")
    )
