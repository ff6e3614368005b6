"""Stops early with the weights of its first epoch, which an interruption follows, and trains on."""

import keras

from tests.scripts.shared import Interrupt, loss, network, write, x, y

model = network()
model.compile(keras.optimizers.Adam(1e-2), loss)
options = {"epochs": 8, "batch_size": 10, "shuffle": False}
stopping = keras.callbacks.EarlyStopping("loss", patience=2, mode="max", restore_best_weights=True)
first = model.fit(x, y, **options, callbacks=[stopping, Interrupt()])
best = [weight.tolist() for weight in model.get_weights()]
second = model.fit(x, y, initial_epoch=7, **options)
write(model, first, second, best=best)
