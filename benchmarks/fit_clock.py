"""Measures Keras `fit` on any backend."""

import time
from typing import Any

import keras


class Clock(keras.callbacks.Callback):
    """Measures from before the first step of an epoch to after its last: `fit` itself starts once
    per run."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restarts the clock at the next step."""
        self.began = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes the time of the first execution."""
        self.began = self.began or time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Updates the seconds; the last call counts."""
        self.seconds = time.perf_counter() - self.began
