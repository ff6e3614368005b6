"""Finds the optimizers and variables that a model holds, wherever it keeps them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf


def reachable(model: keras.Model) -> list[Any]:
    """Returns all objects that TensorFlow tracks, then what it misses, each once.

    It looks neither into the lists that Keras makes of a model's lists, nor into objects of a user's own classes.
    """
    tracked = [*tf.train.TrackableView(model).descendants()]
    seen: set[int] = set()
    missed = [held for item in tracked if isinstance(item, keras.Layer) for held in _held_by(item, seen)]
    return [*{id(item): item for item in (*tracked, *missed)}.values()]


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the optimizers that a model holds, each once; of a LossScaleOptimizer, the inner one."""
    optimizers = [item for item in reachable(model) if isinstance(item, keras.optimizers.Optimizer)]
    inner = (getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers)
    return [*{id(optimizer): optimizer for optimizer in inner}.values()]


def _held_by(item: Any, seen: set[int]) -> Iterator[Any]:
    """Yields optimizers and variables in the containers and the plain objects among an object's attributes."""
    if id(item) in seen:
        return
    seen.add(id(item))
    if isinstance(item, Mapping):
        parts: Iterable[Any] = item.values()
    elif isinstance(item, (list, tuple)):
        parts = item
    else:
        parts = vars(item).values()
    for part in [*parts]:
        if isinstance(part, (keras.optimizers.Optimizer, tf.Variable, keras.Variable)):
            yield part
        elif isinstance(part, (Mapping, list, tuple)) or _is_plain(part):
            yield from _held_by(part, seen)


def _is_plain(value: Any) -> bool:
    """Returns whether it is an object of a class of neither Keras, TensorFlow nor Python itself."""
    kind = type(value)
    library = kind.__module__.partition(".")[0] in ("keras", "tensorflow", "numpy", "builtins", "functools", "types")
    return hasattr(value, "__dict__") and not library and not isinstance(value, (type, keras.Layer))
