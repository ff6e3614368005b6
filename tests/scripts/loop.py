"""Calls fit in a loop, with callbacks, and goes on with a model that it has saved and loaded; it
may be interrupted."""

import os
import signal
import sys
from pathlib import Path

import keras

from tests.scripts.shared import loss, network, write, x, y


class Interrupt(keras.callbacks.Callback):
    """Sends a signal in the second call of fit, unless an earlier start has done so."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        marks = [Path(mark) for mark in sys.argv[2:]]
        if epoch == 1 and len(histories) == 1 and marks and not marks[0].exists():
            marks[0].write_text("sent")
            os.kill(os.getpid(), signal.SIGTERM)


model = network()
model.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss, metrics=["accuracy"])
histories: list[keras.callbacks.History] = []
for _ in range(3):
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    histories += [
        model.fit(
            x,
            y,
            epochs=5,
            batch_size=16,
            shuffle=False,
            verbose=0,
            validation_split=0.25,
            callbacks=[
                stopping,
                keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5),
                Interrupt(),
            ],
        )
    ]
model.save("model.keras")
again = keras.models.load_model("model.keras")
histories += [again.fit(x, y, epochs=1, batch_size=16, shuffle=False, verbose=0)]
write(again, *histories)
