"""Follows https://keras.io/examples/generative/dcgan_overriding_train_step/: faces by DCGAN, with noisy labels."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

LATENT = 128


def discriminator_network() -> keras.Model:
    model = keras.Sequential([keras.Input((64, 64, 3))])
    for filters in (64, 128, 128):
        model.add(layers.Conv2D(filters, 4, strides=2, padding="same"))
        model.add(layers.LeakyReLU(negative_slope=0.2))
    for layer in (layers.Flatten(), layers.Dropout(0.2), layers.Dense(1, activation="sigmoid")):
        model.add(layer)
    return model


def generator_network() -> keras.Model:
    model = keras.Sequential([keras.Input((LATENT,)), layers.Dense(8 * 8 * 128), layers.Reshape((8, 8, 128))])
    for filters in (128, 256, 512):
        model.add(layers.Conv2DTranspose(filters, 4, strides=2, padding="same"))
        model.add(layers.LeakyReLU(negative_slope=0.2))
    model.add(layers.Conv2D(3, 5, padding="same", activation="sigmoid"))
    return model


class GAN(keras.Model):
    def __init__(self, discriminator: keras.Model, generator: keras.Model) -> None:
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric, self.g_loss_metric = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real: Any) -> dict[str, Any]:
        rows = ops.shape(real)[0]
        noise = keras.random.normal((rows, LATENT), seed=self.seed_generator)
        both = ops.concatenate([self.generator(noise), real], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels), dtype=labels.dtype)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        noise = keras.random.normal((rows, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((rows, 1)), self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


# Glue


def data(config: Any) -> Any:
    return np.random.default_rng(0).random((64, 64, 64, 3))


def build(config: Any, dataset: Any) -> keras.Model:
    model = GAN(discriminator_network(), generator_network())
    adam = [keras.optimizers.Adam(1e-4) for _ in range(2)]
    model.compile(*adam, keras.losses.BinaryCrossentropy())
    model.templates = lambda: {"model": model.generator, "discriminator": model.discriminator}
    return model
