"""Follows https://keras.io/examples/generative/vq_vae/: codes of a codebook, with losses that a layer adds."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

LATENT, CODES = 16, 64


class VectorQuantizer(layers.Layer):
    def __init__(self, codes: int, width: int, beta: float = 0.25, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.codes, self.width, self.beta = codes, width, beta
        start = keras.initializers.RandomUniform(-0.05, 0.05, seed=0)
        self.embeddings = self.add_weight(shape=(width, codes), initializer=start, name="embeddings_vqvae")

    def call(self, x: Any) -> Any:
        flat = tf.reshape(x, (-1, self.width))
        distances = tf.reduce_sum(flat**2, axis=1, keepdims=True) + tf.reduce_sum(self.embeddings**2, axis=0)
        nearest = tf.argmin(distances - 2 * tf.matmul(flat, self.embeddings), axis=1)
        quantized = tf.matmul(tf.one_hot(nearest, self.codes, dtype=x.dtype), self.embeddings, transpose_b=True)
        quantized = tf.reshape(quantized, tf.shape(x))
        commitment = tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2)
        self.add_loss(self.beta * commitment + tf.reduce_mean((quantized - tf.stop_gradient(x)) ** 2))
        return x + tf.stop_gradient(quantized - x)


def network() -> keras.Model:
    image = keras.Input((28, 28, 1))
    x = layers.Conv2D(32, 3, activation="relu", strides=2, padding="same")(image)
    x = layers.Conv2D(64, 3, activation="relu", strides=2, padding="same")(x)
    x = VectorQuantizer(CODES, LATENT, name="vector_quantizer")(layers.Conv2D(LATENT, 1, padding="same")(x))
    x = layers.Conv2DTranspose(64, 3, activation="relu", strides=2, padding="same")(x)
    x = layers.Conv2DTranspose(32, 3, activation="relu", strides=2, padding="same")(x)
    return keras.Model(image, layers.Conv2DTranspose(1, 3, padding="same")(x), name="vq_vae")


class VQVAETrainer(keras.Model):
    def __init__(self, variance: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.variance, self.vqvae = variance, network()
        self.trackers = [keras.metrics.Mean(name) for name in ("loss", "reconstruction_loss", "vqvae_loss")]

    @property
    def metrics(self) -> list[keras.Metric]:
        return self.trackers

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            reconstruction = tf.reduce_mean((x - self.vqvae(x)) ** 2) / self.variance
            total = reconstruction + sum(self.vqvae.losses)
        weights = self.vqvae.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
        for tracker, value in zip(self.trackers, (total, reconstruction, sum(self.vqvae.losses)), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


# Glue


def data(config: Any) -> Any:
    return np.random.default_rng(0).random((64, 28, 28, 1)) - 0.5


def build(config: Any, dataset: Any) -> keras.Model:
    model = VQVAETrainer(0.08)
    model.compile(optimizer=keras.optimizers.Adam())
    model.templates = lambda: {"model": model.vqvae}
    return model
