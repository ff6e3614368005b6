"""Turns TensorFlow's errors about a disk that it cannot write to into this package's errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

from trainer.base.storage import cannot_write


@contextmanager
def tensorflow_writing(path: Path) -> Iterator[None]:
    """Turns errors of TensorFlow's own writing within the block into a UserError that names `path`.

    TensorFlow reports a full disk as a ResourceExhaustedError, like exhausted memory.
    """
    try:
        yield
    except tf.errors.OpError as error:
        first_line = error.message.partition("\n")[0].partition(" [Op:")[0]
        raise cannot_write(path, first_line.rpartition("; ")[2]) from error
