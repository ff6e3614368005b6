"""Follows https://keras.io/examples/vision/siamese_network/: distances of triplets, with steps of its own."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class DistanceLayer(layers.Layer):
    def call(self, anchor: Any, positive: Any, negative: Any) -> Any:
        return tuple(ops.sum(tf.square(anchor - side), -1) for side in (positive, negative))


def network() -> keras.Model:
    image = keras.Input((50, 50, 3))
    base = layers.Conv2D(8, 3, strides=4, activation="relu")
    base.trainable = False
    x = layers.Dense(64, activation="relu")(layers.Flatten()(layers.Conv2D(8, 3, strides=4)(base(image))))
    embedding = keras.Model(image, layers.Dense(32)(layers.BatchNormalization()(x)), name="Embedding")
    inputs = [keras.Input((50, 50, 3), name=name) for name in ("anchor", "positive", "negative")]
    return keras.Model(inputs, DistanceLayer()(*(embedding(side) for side in inputs)))


class SiameseModel(keras.Model):
    def __init__(self, siamese: keras.Model, margin: float = 0.5) -> None:
        super().__init__()
        self.siamese, self.margin = siamese, margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs: Any) -> Any:
        return self.siamese(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
        gradients = tape.gradient(loss, self.siamese.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.siamese.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.loss_tracker.update_state(self._compute_loss(data))
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data: Any) -> Any:
        near, far = self.siamese(data)
        return tf.maximum(near - far + self.margin, 0.0)

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.loss_tracker]


# Glue


def data(config: Any) -> Any:
    triplets = tf.data.Dataset.from_tensor_slices(tuple(np.random.default_rng(0).random((3, 64, 50, 50, 3))))
    return triplets, triplets.take(9)


def build(config: Any, dataset: Any) -> keras.Model:
    model = SiameseModel(network())
    model.compile(optimizer=keras.optimizers.Adam(0.0001), weighted_metrics=[])
    return model
