"""python -m trainer.task --model=examples.table:build --data=examples.table:data --learning_rate=1e-2 \
    --epochs=30 --evaluation_fraction=0.2 --job_dir=runs/table

Predicts one number from each row of a table, and evaluates it on a fifth of the rows after each epoch. The table is a
CSV file of numbers without a header, what to predict in the last column: add --csv=FILE. Without it, 2,000 rows are
generated, and val_mae becomes 0.09, of which the noise in them is 0.08. --csv and --units are settings of this file's
own: keyword-only parameters.
"""

from typing import Any

import keras
import numpy as np

from trainer.config.train_config import TrainConfig
from trainer.data.dataset import Dataset


def data(config: TrainConfig, *, csv: str = "") -> Any:
    """Returns (x, y), as `fit` takes them: (rows, columns) and (rows,)."""
    table = np.loadtxt(csv, delimiter=",") if csv else generated()
    return table[:, :-1], table[:, -1]


def generated() -> Any:
    """Returns 2,000 rows of five columns and their target, with noise of standard deviation 0.1."""
    draw = np.random.default_rng(0)
    x = draw.uniform(0, 1, (2000, 5))
    y = np.sin(6 * x[:, 0]) + x[:, 1] * x[:, 2] + draw.normal(0, 0.1, 2000)
    return np.column_stack([x, y])


def build(config: TrainConfig, dataset: Dataset, *, csv: str = "", units: int = 32) -> keras.Model:
    """Returns a compiled Keras model; the learning rate is that of --learning_rate."""
    x, _ = data(config, csv=csv)
    normalization = keras.layers.Normalization()
    normalization.adapt(x)
    model = keras.Sequential([
        keras.Input(x.shape[1:]),
        normalization,
        keras.layers.Dense(units, activation="relu"),
        keras.layers.Dense(units, activation="relu"),
        keras.layers.Dense(1),
    ])  # fmt: skip
    model.compile(keras.optimizers.Adam(config.learning_rate), loss="mse", metrics=["mae"])
    return model
