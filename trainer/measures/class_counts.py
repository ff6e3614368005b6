"""Counts, while a classifier is evaluated, what it predicts for the rows of each class."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from trainer.user_code.interface import ModelInterface, has_class_outputs

MOST_CLASSES = 1000  # of a confusion matrix


def counted_classes(model: keras.Model) -> int:
    """Returns the number of classes of a model with one output and sparse categorical cross-entropy; 0 of any other."""
    loss = ModelInterface.of(model).loss
    sparse = isinstance(loss, keras.losses.SparseCategoricalCrossentropy) and loss.ignore_class is None
    own_test = type(model).test_step is not keras.Model.test_step
    if own_test or not (sparse or loss == "sparse_categorical_crossentropy") or not has_class_outputs(model):
        return 0
    classes = int(model.output_shape[-1])
    return classes if classes <= MOST_CLASSES else 0


def confusion(labels: Any, outputs: Any) -> Any:
    """Returns the rows of each true class (first) and predicted class, float64, which add up exactly.

    labels: (rows,) or (rows, 1); outputs: (rows, classes).
    """
    predicted = tf.argmax(outputs, axis=1)
    return tf.math.confusion_matrix(tf.reshape(labels, (-1,)), predicted, outputs.shape[1], dtype=tf.float64)


@contextmanager
def outputs_kept(model: keras.Model) -> Iterator[list[Any]]:
    """Yields the outputs with which test_step computes the model's metrics in the block."""
    outputs: list[Any] = []
    compute = model.compute_metrics

    def keep(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        outputs.append(y_pred)
        return compute(x, y, y_pred, sample_weight)

    model.compute_metrics = keep
    try:
        yield outputs
    finally:
        del model.compute_metrics
