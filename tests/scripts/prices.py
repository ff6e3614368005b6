"""Predicts prices of two inputs, a Normalization and a category, by the functional API; shuffles
with a seed."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.scripts.shared import ROWS, Interrupt, write, x

places = np.random.default_rng(4).choice(["north", "south", "west"], ROWS)
price = x @ np.arange(6.0) + 3 * (places == "west")


def halved(values: Any) -> Any:
    return values / 2


scale = keras.layers.Normalization()
scale.adapt(x)
lookup = keras.layers.StringLookup(output_mode="one_hot")
lookup.adapt(places)
table = keras.Input((6,), name="table")
place = keras.Input((4,), name="place")
hidden = keras.layers.Dense(8, activation="relu")(keras.layers.concatenate([scale(table), place]))
hidden = keras.layers.Lambda(halved, output_shape=(8,))(hidden)
model = keras.Model([table, place], keras.layers.Dense(1)(hidden))
rate = keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=5, decay_rate=0.9)
model.compile(keras.optimizers.Adam(rate), loss="mse", metrics=["mae"])
inputs = [x, lookup(places).numpy().astype("float64")]
history = model.fit(inputs, price, epochs=2, batch_size=16, validation_split=0.2, shuffle=False)
for _ in range(2):
    again = model.fit(inputs, price, epochs=1, batch_size=12, shuffle=False, verbose=0)
shuffled = tf.data.Dataset.from_tensor_slices((tuple(inputs), price))
shuffled = shuffled.shuffle(100, seed=7, reshuffle_each_iteration=False).batch(10)
last = model.fit(shuffled, epochs=2, callbacks=[Interrupt()])
write(model, history, again, last, predicted=model.predict(inputs).tolist())
