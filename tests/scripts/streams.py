"""Reads data in three ways: a tf.data.Dataset, one of a generator, and a PyDataset."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.scripts.shared import ROWS, Interrupt, loss, network, write, x, y


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        rows = slice(10 * number, 10 * number + 10)
        return x[rows], y[rows]


def generate() -> Iterator[Any]:
    for first in range(0, ROWS, 10):
        yield x[first : first + 10], y[first : first + 10]


signature = tf.TensorSpec((None, 6), tf.float64), tf.TensorSpec((None,), tf.int32)
batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
model = network()
model.compile("sgd", loss)
histories = [
    model.fit(batches, epochs=2, validation_data=batches),
    model.fit(
        tf.data.Dataset.from_generator(generate, output_signature=signature),
        epochs=2,
        steps_per_epoch=3,
    ),
    model.fit(Batches(), epochs=2, shuffle=False, callbacks=[Interrupt()]),
    model.fit(batches.repeat(), epochs=2, steps_per_epoch=5),
]
write(model, *histories, evaluated=model.evaluate(batches))
