"""Follows https://keras.io/examples/generative/wgan_gp/: clothes by WGAN-GP, with means and noise by TensorFlow."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

NOISE, CRITIC_STEPS, PENALTY = 128, 3, 10.0


def discriminator_network() -> keras.Model:
    image = keras.Input((28, 28, 1))
    x = layers.ZeroPadding2D(2)(image)
    for filters, drops in ((64, False), (128, True), (256, True), (512, False)):
        x = layers.LeakyReLU(negative_slope=0.2)(layers.Conv2D(filters, 5, strides=2, padding="same")(x))
        x = layers.Dropout(0.3)(x) if drops else x
    return keras.Model(image, layers.Dense(1)(layers.Dropout(0.2)(layers.Flatten()(x))))


def generator_network() -> keras.Model:
    noise = keras.Input((NOISE,))
    x = layers.BatchNormalization()(layers.Dense(4 * 4 * 256, use_bias=False)(noise))
    x = layers.Reshape((4, 4, 256))(layers.LeakyReLU(negative_slope=0.2)(x))
    for filters in (128, 64, 1):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(layers.UpSampling2D(2)(x))
        x = layers.BatchNormalization()(x)
        x = layers.Activation("tanh")(x) if filters == 1 else layers.LeakyReLU(negative_slope=0.2)(x)
    return keras.Model(noise, layers.Cropping2D(2)(x))


class WGAN(keras.Model):
    def __init__(self, discriminator: keras.Model, generator: keras.Model) -> None:
        super().__init__()
        self.discriminator, self.generator = discriminator, generator

    def compile(self, d_optimizer: Any, g_optimizer: Any, d_loss_fn: Any, g_loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_loss_fn, self.g_loss_fn = d_loss_fn, g_loss_fn

    def gradient_penalty(self, rows: Any, real: Any, fake: Any) -> Any:
        mixed = real + tf.random.normal([rows, 1, 1, 1], dtype=real.dtype) * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            scores = self.discriminator(mixed, training=True)
        norms = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(scores, [mixed])[0]), axis=[1, 2, 3]))
        return tf.reduce_mean((norms - 1.0) ** 2)

    def train_step(self, real: Any) -> dict[str, Any]:
        real = real[0] if isinstance(real, tuple) else real
        rows = tf.shape(real)[0]
        for _ in range(CRITIC_STEPS):
            noise = tf.random.normal((rows, NOISE), dtype=real.dtype)
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                scores = [self.discriminator(each, training=True) for each in (fake, real)]
                cost = self.d_loss_fn(real_img=scores[1], fake_img=scores[0])
                d_loss = cost + PENALTY * self.gradient_penalty(rows, real, fake)
            variables = self.discriminator.trainable_variables
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, variables), variables, strict=True))
        noise = tf.random.normal((rows, NOISE), dtype=real.dtype)
        with tf.GradientTape() as tape:
            g_loss = self.g_loss_fn(self.discriminator(self.generator(noise, training=True), training=True))
        variables = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, variables), variables, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def discriminator_loss(real_img: Any, fake_img: Any) -> Any:
    return tf.reduce_mean(fake_img) - tf.reduce_mean(real_img)


def generator_loss(fake_img: Any) -> Any:
    return -tf.reduce_mean(fake_img)


# Glue


def data(config: Any) -> Any:
    return np.random.default_rng(0).uniform(-1, 1, (64, 28, 28, 1))


def build(config: Any, dataset: Any) -> keras.Model:
    model = WGAN(discriminator_network(), generator_network())
    adam = [keras.optimizers.Adam(2e-4, beta_1=0.5, beta_2=0.9) for _ in range(2)]
    model.compile(*adam, d_loss_fn=discriminator_loss, g_loss_fn=generator_loss)
    model.templates = lambda: {"model": model.generator, "discriminator": model.discriminator}
    return model
