"""Finds anomalies by a subclassed autoencoder: the rows are their own targets."""

from typing import Any

import keras
import numpy as np

from tests.scripts.shared import Interrupt, write, x


class Autoencoder(keras.Model):
    def __init__(self, latent: int) -> None:
        super().__init__()
        self.encoder = keras.Sequential(
            [
                keras.layers.Dense(8, activation="relu", activity_regularizer="l2"),
                keras.layers.Dense(latent, kernel_regularizer="l2"),
            ]
        )
        self.decoder = keras.Sequential([keras.layers.Dense(8, "gelu"), keras.layers.Dense(6)])

    def call(self, inputs: Any) -> Any:
        return self.decoder(self.encoder(inputs))


model = Autoencoder(2)
model.compile(optimizer=keras.optimizers.AdamW(0.01, clipnorm=1.0), loss="mae")
stopping = keras.callbacks.EarlyStopping(patience=1, min_delta=0.02)
history = model.fit(
    x,
    x,
    epochs=9,
    batch_size=20,
    validation_data=(x[:9], x[:9]),
    shuffle=False,
    callbacks=[stopping, Interrupt()],
)
rebuilt = model.predict(x)
losses = np.abs(rebuilt - x).mean(1)
model.save_weights("best.weights.h5")
other = Autoencoder(2)
other.build((None, 6))
other.load_weights("best.weights.h5")
write(
    model,
    history,
    threshold=losses.mean() + losses.std(),
    encoded=other.encoder(x[:3]).numpy().tolist(),
)
