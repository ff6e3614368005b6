"""Calls fit in a loop, with callbacks, and goes on with a model that it has saved and loaded."""

import keras

from tests.scripts.shared import Interrupt, loss, network, write, x, y

model = network()
model.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss, metrics=["accuracy"])
histories: list[keras.callbacks.History] = []
for number in range(3):
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    slower = keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5)
    history = model.fit(
        x,
        y,
        epochs=5,
        batch_size=16,
        shuffle=False,
        verbose=0,
        validation_split=0.25,
        callbacks=[stopping, slower, *[Interrupt()] * (number == 1)],
    )
    histories.append(history)
model.save("model.keras")
again = keras.models.load_model("model.keras")
histories.append(again.fit(x, y, epochs=1, batch_size=16, shuffle=False, verbose=0))
write(again, *histories)
