"""Warms a head up, then trains the whole network: with weights of classes and rows, and with
validation."""

import keras
import numpy as np

from tests.scripts.shared import Interrupt, loss, write, x, y

base = keras.Sequential(
    [keras.Input((6,)), keras.layers.Dense(9, "tanh"), keras.layers.BatchNormalization()]
)
base.trainable = False
model = keras.Sequential([base, keras.layers.Dense(3)])
model.compile("adam", loss, metrics=["accuracy"])
held_out = x[:7], y[:7]
first = model.fit(
    x,
    y,
    epochs=2,
    batch_size=10,
    shuffle=False,
    validation_data=held_out,
    class_weight={0: 1.0, 1: 2.0, 2: 0.5},
)
base.trainable = True
model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
second = model.fit(
    x,
    y,
    epochs=6,
    initial_epoch=2,
    batch_size=10,
    shuffle=False,
    sample_weight=np.linspace(0, 1, len(x)),
    validation_split=0.2,
    validation_freq=2,
    callbacks=[keras.callbacks.ReduceLROnPlateau("loss", patience=1), Interrupt()],
)
answers = model.predict(x, batch_size=9)
# What is drawn later, as the weights of another model, is as without the calls of `fit`.
next_model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]).get_weights()[0].tolist()
evaluated = model.evaluate(x, y, batch_size=10)
write(model, first, second, evaluated=evaluated, predicted=answers.tolist(), next_model=next_model)
