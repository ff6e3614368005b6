"""Weights the rows of a batch by their class, as `fit(class_weight=…)` does."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError

AsFit = Callable[[tuple[Any, ...]], Any]


def weighted_by_class(as_fit: AsFit, weights: Mapping[int, float]) -> AsFit:
    """Returns `as_fit` with the weight of each row's class as, or times, its sample_weight; classes left out have 1.

    y: (rows,) or (rows, 1) integers, or (rows, classes) one-hot. Raises UserError for other targets.
    """
    if not weights:
        return as_fit
    table = [weights.get(number, 1.0) for number in range(max(weights) + 1)]

    def weighted(parts: tuple[Any, ...]) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(as_fit(parts))
        labels = _labels(y)
        table_weights = tf.gather(
            tf.constant(table, keras.config.floatx()), tf.clip_by_value(labels, 0, len(table) - 1)
        )
        by_class = tf.where(labels < len(table), table_weights, tf.ones_like(table_weights))
        return x, y, by_class if sample_weight is None else by_class * sample_weight

    return weighted


def _labels(y: Any) -> Any:
    shape = None if y is None or tf.nest.is_nested(y) else y.shape
    if shape is not None and shape.rank == 2 and shape[1] > 1:
        return tf.argmax(y, axis=1, output_type=tf.int32)
    if shape is None or shape.rank not in (1, 2) or not y.dtype.is_integer:
        raise UserError("class_weight: the targets are not one class each: use sample weights instead")
    return tf.cast(tf.reshape(y, (-1,)), tf.int32)
