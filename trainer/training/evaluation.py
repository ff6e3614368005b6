"""Measures a classifier's loss and accuracy on the evaluation examples, each counted once on any number of replicas."""

import math
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.data.dataset import Examples
from trainer.distribution.strategy import Replicas
from trainer.interface import has_class_outputs
from trainer.training.loop import CallSize


class Evaluation:
    """Evaluates `model`, a compiled classifier with outputs (rows, classes), on `examples`."""

    def __init__(self, model: keras.Model, replicas: Replicas, examples: Examples) -> None:
        self.model, self.replicas, self.examples = model, replicas, examples
        loss = keras.losses.get(model.loss)  # a function, if given by such a name: it returns one value a row
        self._loss = loss.call if isinstance(loss, keras.losses.Loss) else loss
        self._call_size = CallSize(most_steps=0)
        self._run = tf.function(self._sums)
        self._on_replica = tf.autograph.experimental.do_not_convert(self._replica_sums)

    def __call__(self) -> dict[str, float]:
        """Returns {"val_loss", "val_accuracy"}, means over the examples, under Keras's names."""
        # A few batches a call: between calls workers synchronise, and a signal can interrupt.
        batches, done = math.ceil(self.examples.count / self.replicas.global_batch_size), 0
        total, found = np.zeros(2), [0.0, 0.0]  # sums of losses and correct answers: of this worker, of all
        while done < batches:
            count, began = self._call_size(batches - done), time.monotonic()
            total = self._run(tf.constant(done), tf.constant(done + count), tf.constant(total)).numpy()
            *found, seconds = self.replicas.sum_over_workers([*total, time.monotonic() - began]).tolist()
            self._call_size.learn(count, seconds / self.replicas.cluster.workers)  # equal on all workers
            done += count
        return {"val_loss": found[0] / self.examples.count, "val_accuracy": found[1] / self.examples.count}

    def _sums(self, first: Any, end: Any, total: Any) -> Any:
        """Adds the sums of this worker's rows of these batches to `total`; the padding of the last batch counts 0."""
        strategy, batch = self.replicas.strategy, self.replicas.global_batch_size
        for i in tf.range(first, end):
            sums = strategy.run(self._on_replica, args=(i * batch,))
            total += tf.add_n(list(strategy.experimental_local_results(sums)))
        return total

    def _replica_sums(self, first_row: Any) -> Any:
        replica, rows = tf.distribute.get_replica_context().replica_id_in_sync_group, self.replicas.rows
        wanted = first_row + replica * rows + tf.range(rows)
        counts = tf.cast(wanted < self.examples.count, tf.float64)
        with tf.device("CPU:0"):
            images, labels = self.examples.gather(tf.minimum(wanted, self.examples.count - 1))
        outputs = self.model(tf.cast(images, keras.config.floatx()), training=False)
        losses = tf.cast(self._loss(labels, outputs), tf.float64)
        right = tf.cast(tf.argmax(outputs, axis=-1, output_type=tf.int32) == labels, tf.float64)
        return tf.stack([tf.reduce_sum(losses * counts), tf.reduce_sum(right * counts)])


def evaluation(model: keras.Model, replicas: Replicas, examples: Examples | None) -> Evaluation | None:
    """Returns what evaluates `model`; None without labelled examples, or if it is no classifier with one loss."""
    if examples is None or not (examples.labelled and model.compiled and has_class_outputs(model)):
        return None
    one_loss = model.loss is not None and not isinstance(model.loss, (dict, list))
    return Evaluation(model, replicas, examples) if one_loss else None
