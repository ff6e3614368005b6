"""Counts, while a classifier is evaluated, what it predicts for the rows of each class, and how sure it is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from trainer.reporting.classification import BINS, MOST_IN_MATRIX, TOP
from trainer.user_code.interface import ModelInterface, has_class_outputs

_STEPS = 2.0**20  # confidences are counted in these parts of 1: their sums are then exact, in any order


class ClassCounts:
    """Counts rows of a batch as the fields of `Classification`, which add up over batches and replicas.

    names: of all classes; logits: whether the outputs are logits, else probabilities.
    """

    def __init__(self, names: tuple[str, ...], *, logits: bool) -> None:
        self.names, self._logits, classes = names, logits, len(names)
        by_class = dict.fromkeys(("support", "predicted", "correct", "in_top"), (classes,))
        self.shapes: dict[str, tuple[int, ...]] = {**by_class, "bins": (3, BINS)}
        if classes <= MOST_IN_MATRIX:
            self.shapes["confusion"] = (classes, classes)

    def of_batch(self, labels: Any, outputs: Any) -> dict[str, Any]:
        """Returns the counts, float64, of labels, (rows,) or (rows, 1), and outputs, (rows, classes)."""
        classes = len(self.names)
        labels = tf.cast(tf.reshape(labels, (-1,)), tf.int64)
        top = tf.cast(tf.math.top_k(outputs, min(TOP, classes)).indices, tf.int64)
        predicted = top[:, 0]
        correct, in_top = predicted == labels, tf.reduce_any(top == labels[:, None], axis=1)
        sure = tf.reduce_max(tf.nn.softmax(outputs) if self._logits else outputs, axis=1)
        sure = tf.clip_by_value(tf.cast(sure, tf.float64), 0.0, 1.0)
        bins = tf.clip_by_value(tf.cast(tf.math.ceil(sure * BINS), tf.int64) - 1, 0, BINS - 1)
        sure, every = tf.round(sure * _STEPS) / _STEPS, tf.ones_like(sure)

        def sums(values: Any, ids: Any, count: int) -> Any:
            return tf.math.unsorted_segment_sum(tf.cast(values, tf.float64), ids, count)

        counts = {
            "support": sums(every, labels, classes),
            "predicted": sums(every, predicted, classes),
            "correct": sums(correct, labels, classes),
            "in_top": sums(in_top, labels, classes),
            "bins": tf.stack([sums(values, bins, BINS) for values in (every, correct, sure)]),
        }
        if shape := self.shapes.get("confusion"):
            counts["confusion"] = tf.reshape(sums(every, labels * classes + predicted, classes * classes), shape)
        return counts


def class_counts(model: keras.Model, names: Sequence[str]) -> ClassCounts | None:
    """Returns what counts a model with one output and sparse categorical cross-entropy; None for any other model.

    names: of the classes; those left out have their number.
    """
    loss = ModelInterface.of(model).loss
    sparse = isinstance(loss, keras.losses.SparseCategoricalCrossentropy) and loss.ignore_class is None
    own_test = type(model).test_step is not keras.Model.test_step
    if own_test or not (sparse or loss == "sparse_categorical_crossentropy") or not has_class_outputs(model):
        return None
    classes = model.output_shape[-1]
    known = (*names, *map(str, range(len(names), classes)))[:classes]
    return ClassCounts(known, logits=bool(getattr(loss, "from_logits", False)))


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
