"""Gives a model the context of the current step: its rows of the global batch, and random numbers for them.

The loop sets the context in each replica; a model's `train_step` reads it by `current_step()`. Every draw is a function
of (seed, step, stream), made for the whole global batch and then sliced, so that a global row gets the same numbers on
any number of replicas and in every precision (drawn in float32, then cast).
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf


@dataclass(frozen=True)
class StepContext:
    """Describes one step as one replica runs it."""

    seed: int
    step: Any  # int64 scalar tensor, counted from 0
    first_row: Any  # index in the global batch of this replica's first row
    rows: int
    global_batch_size: int
    prefix: str = ""  # put before the name of every stream

    def within(self, name: str) -> "StepContext":
        """Returns the same step with separate streams: equal stream names give other numbers than elsewhere."""
        return replace(self, prefix=f"{self.prefix}{name}/")

    def normal(self, shape: Sequence[int], stream: str) -> Any:
        """Returns standard normal numbers, (rows, *shape), in floatx. Two draws in one step need two streams."""
        return self._draw(tf.random.stateless_normal, shape, stream)

    def uniform(self, shape: Sequence[int], stream: str) -> Any:
        """Returns uniform numbers in [0, 1), (rows, *shape), in floatx."""
        return self._draw(tf.random.stateless_uniform, shape, stream)

    def mean(self, values: Any) -> Any:
        """Returns the sum of this replica's rows divided by the GLOBAL batch, so that the replicas' parts add up."""
        return tf.reduce_sum(values) / self.global_batch_size

    def _draw(self, draw: Any, shape: Sequence[int], stream: str) -> Any:
        key = hashlib.blake2b(f"{self.seed}/{self.prefix}{stream}".encode(), digest_size=7).digest()
        seed = tf.stack([tf.constant(int.from_bytes(key, "big"), tf.int64), tf.cast(self.step, tf.int64)])
        whole = draw((self.global_batch_size, *shape), seed=seed, dtype=tf.float32, alg="philox")
        begin = [self.first_row] + [0] * len(shape)
        own = whole if self.rows == self.global_batch_size else tf.slice(whole, begin, [self.rows, *shape])
        return tf.cast(own, keras.config.floatx())


_current: ContextVar[StepContext | None] = ContextVar("current_step", default=None)


def running_step() -> StepContext | None:
    """Returns the step that this replica runs, or None outside the loop."""
    return _current.get()


def current_step() -> StepContext:
    """Returns the step that this replica runs; raises RuntimeError outside the loop."""
    step = running_step()
    if step is None:
        raise RuntimeError("no step is running: a model that uses current_step() must be trained by trainer's own loop")
    return step


@contextmanager
def in_step(step: StepContext) -> Iterator[StepContext]:
    """Makes current_step() return `step` within the block, in this thread."""
    token = _current.set(step)
    try:
        yield step
    finally:
        _current.reset(token)
