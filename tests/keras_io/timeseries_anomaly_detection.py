"""Follows https://keras.io/examples/timeseries/timeseries_anomaly_detection/: an autoencoder of windows of a series."""

from typing import Any

import keras
import numpy as np
from keras import layers

STEPS = 288


def network() -> keras.Model:
    options = {"padding": "same", "strides": 2, "activation": "relu"}
    return keras.Sequential([
        keras.Input((STEPS, 1)),
        layers.Conv1D(32, 7, **options), layers.Dropout(0.2), layers.Conv1D(16, 7, **options),
        layers.Conv1DTranspose(16, 7, **options), layers.Dropout(0.2), layers.Conv1DTranspose(32, 7, **options),
        layers.Conv1DTranspose(1, 7, padding="same"),
    ])  # fmt: skip


# Glue


def data(config: Any) -> Any:
    windows = np.lib.stride_tricks.sliding_window_view(np.sin(np.arange(STEPS + 71) / 9), STEPS)[..., None]
    return (windows[:64], windows[:64]), (windows[64:], windows[64:])


def build(config: Any, dataset: Any) -> keras.Model:
    model = network()
    model.compile(keras.optimizers.Adam(learning_rate=0.001), "mse")
    return model


def callbacks() -> list[keras.callbacks.Callback]:
    return [keras.callbacks.EarlyStopping("val_loss", patience=5, mode="min")]
