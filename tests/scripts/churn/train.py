"""Predicts which customers leave, from a table beside the script, as tutorials do."""

import argparse
import csv
import json
from pathlib import Path

import keras
import numpy as np
from columns import NUMBERS

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--found", default="")
arguments = parser.parse_args()

with open(Path("data") / "churn.csv", newline="") as file:
    rows = list(csv.DictReader(file))
# a name that no text has
limits = json.loads(Path("_".join(["limits", "of", "columns.json"])).read_text())
x = np.array([[min(float(row[name]), limits[name]) for name in NUMBERS] for row in rows])
y = np.array([float(row["left"]) for row in rows])

keras.utils.set_random_seed(3)
scale = keras.layers.Normalization()
scale.adapt(x)
model = keras.Sequential([keras.Input((len(NUMBERS),)), scale, keras.layers.Dense(1, "sigmoid")])
model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=8, epochs=arguments.epochs, shuffle=False)
if arguments.found:
    Path(arguments.found).write_text(json.dumps(history.history))
