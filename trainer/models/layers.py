"""Layers whose randomness belongs to the step, and what several models share."""

from typing import Any

import keras
import tensorflow as tf

from trainer.distribution.step import current_step


class StepDropout(keras.layers.Layer):
    """Dropout whose mask is a function of (seed, step, global row): the same on any number of replicas.

    A saved template holds Keras's own Dropout in its place (`plain`): at inference both do nothing.
    """

    def __init__(self, rate: float, *, per_example: bool = False, **kwargs: Any) -> None:
        """`per_example` drops whole examples (stochastic depth) instead of single values."""
        super().__init__(**kwargs)
        self.rate, self.per_example = rate, per_example

    def call(self, inputs: Any, training: bool = False) -> Any:
        """(rows, …) -> the same shape, kept values scaled by 1 / (1 - rate)."""
        if not training or not self.rate:
            return inputs
        shape = [1] * (len(inputs.shape) - 1) if self.per_example else inputs.shape[1:]
        drawn = current_step().uniform(shape, stream=f"dropout/{self.name}")
        kept = tf.cast(drawn >= self.rate, inputs.dtype)
        return inputs * kept / tf.cast(1.0 - self.rate, inputs.dtype)

    def plain(self) -> keras.layers.Layer:
        """The layer that a template holds instead."""
        return keras.layers.Dropout(self.rate, name=self.name)  # which does nothing at inference

    def get_config(self) -> dict[str, Any]:
        """As Keras asks."""
        return {**super().get_config(), "rate": self.rate, "per_example": self.per_example}


def full_precision() -> str:
    """The type of weights: outputs and losses keep it where layers between compute in 16 bits."""
    return str(keras.config.dtype_policy().variable_dtype)
