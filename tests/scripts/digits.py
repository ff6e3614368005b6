"""Is the beginner's script: grey pictures, a Flatten, two Dense layers, and probabilities at its
end."""

import keras
import numpy as np
import tensorflow as tf

from tests.scripts.shared import ROWS, Interrupt, write

pictures = np.random.default_rng(1).integers(0, 256, (ROWS + 20, 5, 5)).astype("uint8")
labels = (pictures.mean((1, 2)) // 20 % 10).astype("uint8")
x_train, y_train = pictures[:ROWS] / 255.0, labels[:ROWS]
x_test, y_test = pictures[ROWS:] / 255.0, labels[ROWS:]
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)

keras.backend.clear_session()
model = keras.models.Sequential(
    [
        keras.layers.Flatten(),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(10),
    ]
)
untrained = model.predict(x_test)
model.compile(
    optimizer="adam",
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(x_train, y_train, epochs=3, shuffle=False, callbacks=[Interrupt()])
evaluated = model.evaluate(x_test, y_test, verbose=2)
probabilities = keras.Sequential([model, keras.layers.Softmax()])
write(
    model,
    history,
    evaluated=evaluated,
    untrained=untrained.tolist(),
    first=probabilities(x_test[:5]).numpy().tolist(),
    predicted=probabilities.predict(x_test).argmax(1).tolist(),
)
