"""Keras callbacks of the user's own, under our loop: epoch hooks as in `fit`, batch hooks once a call to the device."""

from typing import Any

import keras

from trainer.errors import UserError
from trainer.imports import load_function


def load_callbacks(path: str, model: keras.Model, epochs: int, steps_per_epoch: int) -> keras.callbacks.CallbackList:
    """The callbacks that `path` (package.module:function) returns, bound to `model`; none for an empty path."""
    found: Any = load_function(path, "callbacks")() if path else []
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, keras.callbacks.Callback) for one in found):
        raise UserError(f"callbacks={path}: it must return a list of keras.callbacks.Callback, it returned {found!r}")
    return keras.callbacks.CallbackList(list(found), model=model, epochs=epochs, steps=steps_per_epoch, verbose=0)
