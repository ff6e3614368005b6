"""Turns the failure of a run, such as a full memory or disk, into the one line that the log and
result.json have."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

from trainer.base.errors import PlatformFault, UserError, shortened
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import cannot_write
from trainer.cluster.devices import half_precision
from trainer.cluster.strategy import Replicas


@contextmanager
def tensorflow_writing(path: Path) -> Iterator[None]:
    """Turns an error of TensorFlow as it writes files into a UserError that names `path`.

    TensorFlow reports a full disk as a ResourceExhaustedError, like exhausted memory.
    """
    try:
        yield
    except tf.errors.OpError as error:
        first_line = error.message.partition("\n")[0].partition(" [Op:")[0]
        raise cannot_write(path, first_line.rpartition("; ")[2]) from error


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether memory ran out.

    Another device may raise first, with another type of error that quotes it.
    """
    signs = ("OOM when allocating", "RESOURCE_EXHAUSTED", "OUT_OF_MEMORY")
    quoted = isinstance(error, tf.errors.OpError) and any(sign in str(error) for sign in signs)
    return quoted or isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError))


def out_of_memory(config: TrainConfig, replicas: Replicas) -> UserError:
    """Returns a UserError that lists the settings to change so that a step needs less memory."""
    rows = replicas.rows
    twice_as_many = 2 * replicas.micro_batches
    # The smallest number of micro-batches that at least halves the rows of each.
    finer = next((number for number in range(twice_as_many, rows + 1) if rows % number == 0), None)
    advice = []
    if replicas.virtual and rows % twice_as_many == 0:
        advice.append(f"use --virtual_replicas={2 * replicas.virtual}")
    elif finer and not replicas.virtual:
        advice.append(f"use --micro_batches={finer}")
    advice.append("lower global_batch_size or image_size")
    if replicas.on_gpus:
        advice.append("use more replicas")
    if not config.precision.startswith("mixed"):
        advice.append(f"or try --precision={half_precision()}")
    return UserError(
        f"out of memory with {replicas.sentence()}, image_size={config.image_size}:"
        f" {', '.join(advice)}; `python -m deploy plan` says what fits"
    )


def one_line(error: Exception) -> str:
    """Returns the error's text on one line, with its type unless it is one of this package."""
    if isinstance(error, (UserError, PlatformFault)):
        return " ".join(str(error).split())
    return shortened(f"{type(error).__name__}: {error}", 2000)
