"""Shuffles without a seed: arrays, a tf.data pipeline that two calls of fit read, and its batches.

It also draws for Dropout: plain Keras gives other numbers."""

import keras
import tensorflow as tf

from tests.scripts.shared import Interrupt, loss, write, x, y

layers = keras.layers
model = keras.Sequential([layers.Dense(9, "relu"), layers.Dropout(0.2), layers.Dense(3)])
model.compile("sgd", loss)
first = model.fit(x, y, epochs=2, batch_size=10)
batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(10)
second = model.fit(batches, epochs=2, validation_data=(x, y))
third = model.fit(batches.shuffle(3), epochs=3, callbacks=[Interrupt()])
write(model, first, second, third)
