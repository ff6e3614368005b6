"""Turns failures of a run into the one line that the log and result.json report."""

import tensorflow as tf

from trainer.config.train_config import TrainConfig
from trainer.distribution.strategy import Replicas
from trainer.errors import PlatformFault, UserError


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether memory ran out; another device may raise first, with an error of another type that quotes it."""
    signs = ("OOM when allocating", "RESOURCE_EXHAUSTED", "OUT_OF_MEMORY")
    quoted = isinstance(error, tf.errors.OpError) and any(sign in str(error) for sign in signs)
    return quoted or isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError))


def out_of_memory(config: TrainConfig, replicas: Replicas) -> UserError:
    """Returns the error with what to lower."""
    more = ", use more replicas" if replicas.devices[0].startswith("GPU") else ""
    return UserError(
        f"out of memory with {replicas.sentence()}, image_size={config.image_size}: lower global_batch_size or "
        f"image_size{more}, or try --precision=mixed_bfloat16"
    )


def one_line(error: Exception) -> str:
    """Returns the error's text on one line, with its type if it is not one of ours."""
    expected = isinstance(error, (UserError, PlatformFault))
    return " ".join(str(error).split()) if expected else f"{type(error).__name__}: {error}"[:2000]
