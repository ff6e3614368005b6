"""Trains a convolutional network on a cached tf.data pipeline, with callbacks of four kinds."""

import csv
import math

import keras
import numpy as np
import tensorflow as tf

from tests.scripts.shared import Interrupt, write

random = np.random.default_rng(2)
images = random.uniform(size=(44, 8, 8, 3))
labels = (images[..., 0].mean((1, 2)) > 0.5).astype("int64")
pipeline = tf.data.Dataset.from_tensor_slices((images, labels))
train = pipeline.take(34).cache().batch(8).prefetch(tf.data.AUTOTUNE)
held_out = pipeline.skip(34).batch(8)

model = keras.Sequential()
model.add(keras.layers.Input((8, 8, 3)))
model.add(keras.layers.Rescaling(2.0, offset=-1.0))
model.add(keras.layers.Conv2D(4, 3, padding="same", activation="relu"))
model.add(keras.layers.MaxPooling2D())
model.add(keras.layers.BatchNormalization())
model.add(keras.layers.Flatten())
model.add(keras.layers.Dense(1, activation="sigmoid"))
model.compile("rmsprop", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])

seen: list[float] = []
history = model.fit(
    train,
    epochs=4,
    validation_data=held_out,
    callbacks=[
        keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * math.exp(-0.1)),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(logs["val_loss"]),
            on_train_end=lambda logs: seen.append(logs["val_loss"]),
        ),
        Interrupt(),
    ],
)
with open("log.csv") as file:
    logged = [float(row["val_loss"]) for row in csv.DictReader(file)]
best = keras.models.load_model("best.keras")
write(model, history, seen=seen, logged=logged, best=best.evaluate(held_out, return_dict=True))
