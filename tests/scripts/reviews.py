"""Classifies reviews: a TextVectorization that is adapted to them, an Embedding, and a model that
takes text at its end."""

import keras
import numpy as np
import tensorflow as tf

from tests.scripts.shared import Interrupt, write

words = np.array(["a", "film", "so", "good", "bad", "boring", "great", "plot", "not", "very"])
random = np.random.default_rng(3)
texts = [" ".join(random.choice(words, random.integers(3, 9))) for _ in range(45)]
labels = np.array([("good" in text) + ("great" in text) > 0 for text in texts], "float64")

vectorize = keras.layers.TextVectorization(max_tokens=12, output_sequence_length=8)
vectorize.adapt(texts)
raw = tf.data.Dataset.from_tensor_slices((texts, labels))
train = raw.take(35).batch(8).map(lambda text, label: (vectorize(text), label))
test = raw.skip(35).batch(8).map(lambda text, label: (vectorize(text), label))

model = keras.Sequential(
    [
        keras.layers.Embedding(12, 6),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=["accuracy"])
history = model.fit(train, validation_data=test, epochs=3, verbose=2, callbacks=[Interrupt()])
whole = keras.Sequential([keras.Input((1,), dtype="string"), vectorize, model])
whole.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
answers = whole.predict(tf.constant([["a great film"], ["very boring plot"]]))
write(model, history, evaluated=model.evaluate(test), answers=answers.tolist())
