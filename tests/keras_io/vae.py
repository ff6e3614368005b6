"""Follows https://keras.io/examples/generative/vae/: a variational autoencoder with a train_step of its own."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

LATENT = 2


class Sampling(layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


def encoder_network() -> keras.Model:
    image = keras.Input((28, 28, 1))
    x = layers.Conv2D(32, 3, strides=2, activation="relu", padding="same")(image)
    x = layers.Conv2D(64, 3, strides=2, activation="relu", padding="same")(x)
    x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
    mean, log_variance = layers.Dense(LATENT)(x), layers.Dense(LATENT)(x)
    return keras.Model(image, [mean, log_variance, Sampling()([mean, log_variance])])


def decoder_network() -> keras.Model:
    latent = keras.Input((LATENT,))
    x = layers.Reshape((7, 7, 64))(layers.Dense(7 * 7 * 64, activation="relu")(latent))
    x = layers.Conv2DTranspose(64, 3, strides=2, activation="relu", padding="same")(x)
    x = layers.Conv2DTranspose(32, 3, strides=2, activation="relu", padding="same")(x)
    return keras.Model(latent, layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x))


class VAE(keras.Model):
    def __init__(self, encoder: keras.Model, decoder: keras.Model, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.trackers = [keras.metrics.Mean(name) for name in ("total_loss", "reconstruction_loss", "kl_loss")]

    @property
    def metrics(self) -> list[keras.Metric]:
        return self.trackers

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, log_variance, latent = self.encoder(data)
            errors = ops.sum(keras.losses.binary_crossentropy(data, self.decoder(latent)), axis=(1, 2))
            divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            parts = [ops.mean(errors), ops.mean(ops.sum(divergence, axis=1))]
            total = parts[0] + parts[1]
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
        for tracker, value in zip(self.trackers, [total, *parts], strict=True):
            tracker.update_state(value)
        return {name: tracker.result() for name, tracker in zip(("loss", "error", "kl"), self.trackers, strict=True)}


# Glue


def data(config: Any) -> Any:
    return np.random.default_rng(0).random((64, 28, 28, 1))


def build(config: Any, dataset: Any) -> keras.Model:
    model = VAE(encoder_network(), decoder_network())
    model.compile(optimizer=keras.optimizers.Adam())
    model.templates = lambda: {"model": model.decoder, "encoder": model.encoder}
    return model
