"""Follows https://keras.io/examples/generative/conditional_gan/: digits of a given class."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

LATENT = 128
CLASSES = 10
SIZE = 28


def discriminator_network() -> keras.Model:
    blocks = [
        layer
        for filters in (64, 128)
        for layer in (
            layers.Conv2D(filters, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
        )
    ]
    return keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 1 + CLASSES)),
            *blocks,
            layers.GlobalMaxPooling2D(),
            layers.Dense(1),
        ]
    )


def generator_network() -> keras.Model:
    width = LATENT + CLASSES
    first = [
        layers.Dense(7 * 7 * width),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Reshape((7, 7, width)),
    ]
    blocks = [
        layer
        for _ in range(2)
        for layer in (
            layers.Conv2DTranspose(128, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
        )
    ]
    last = layers.Conv2D(1, 7, padding="same", activation="sigmoid")
    return keras.Sequential([keras.Input((width,)), *first, *blocks, last])


class ConditionalGAN(keras.Model):
    def __init__(self, discriminator: keras.Model, generator: keras.Model) -> None:
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.generator_loss = keras.metrics.Mean(name="generator_loss")
        self.discriminator_loss = keras.metrics.Mean(name="discriminator_loss")

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.generator_loss, self.discriminator_loss]

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, data: Any) -> dict[str, Any]:
        images, classes = data
        rows = ops.shape(images)[0]
        planes = ops.repeat(classes[:, :, None, None], repeats=[SIZE * SIZE])
        planes = ops.reshape(planes, (-1, SIZE, SIZE, CLASSES))

        def noise() -> Any:
            return ops.concatenate(
                [keras.random.normal((rows, LATENT), seed=self.seed_generator), classes], axis=1
            )

        drawn = ops.concatenate([self.generator(noise()), planes], -1)
        both = ops.concatenate([drawn, ops.concatenate([images, planes], -1)], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        given = noise()
        with tf.GradientTape() as tape:
            drawn = ops.concatenate([self.generator(given), planes], -1)
            g_loss = self.loss_fn(ops.zeros((rows, 1)), self.discriminator(drawn))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.generator_loss.update_state(g_loss)
        self.discriminator_loss.update_state(d_loss)
        return {"g_loss": self.generator_loss.result(), "d_loss": self.discriminator_loss.result()}


# Glue


def data(config: Any) -> Any:
    draw = np.random.default_rng(0)
    return draw.random((64, SIZE, SIZE, 1)), keras.utils.to_categorical(
        draw.integers(0, CLASSES, 64), CLASSES
    )


def build(config: Any, dataset: Any) -> keras.Model:
    model = ConditionalGAN(discriminator_network(), generator_network())
    adam = [keras.optimizers.Adam(3e-4) for _ in range(2)]
    model.compile(*adam, keras.losses.BinaryCrossentropy(from_logits=True))
    model.templates = lambda: {"model": model.generator, "discriminator": model.discriminator}
    return model
