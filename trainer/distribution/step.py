"""What a model may know of the step it is in: its rows of the global batch, and random numbers for them.

The loop sets the context in each replica; a model's `train_step` asks `current_step()`. Every draw is a function of
(seed, step, stream) made for the whole global batch and then sliced, so that a global row sees the same numbers on
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
    """One replica's view of one step."""

    seed: int
    step: Any  # int64 scalar tensor, counted from 0
    first_row: Any  # where this replica's rows begin in the global batch
    rows: int
    global_batch_size: int
    prefix: str = ""  # of every stream

    def within(self, name: str) -> "StepContext":
        """The same step with streams of its own: what draws here does not meet what draws elsewhere."""
        return replace(self, prefix=f"{self.prefix}{name}/")

    def normal(self, shape: Sequence[int], stream: str) -> Any:
        """Standard normal numbers, (rows, *shape), in floatx. Two draws of one step need two streams."""
        return self._draw(tf.random.stateless_normal, shape, stream)

    def uniform(self, shape: Sequence[int], stream: str) -> Any:
        """Numbers uniform in [0, 1), (rows, *shape), in floatx."""
        return self._draw(tf.random.stateless_uniform, shape, stream)

    def mean(self, values: Any) -> Any:
        """Sum of one value a row over this replica's rows, divided by the GLOBAL batch: replicas then add up."""
        return tf.reduce_sum(values) / self.global_batch_size

    def _draw(self, draw: Any, shape: Sequence[int], stream: str) -> Any:
        key = hashlib.blake2b(f"{self.seed}/{self.prefix}{stream}".encode(), digest_size=7).digest()
        seed = tf.stack([tf.constant(int.from_bytes(key, "big"), tf.int64), tf.cast(self.step, tf.int64)])
        whole = draw((self.global_batch_size, *shape), seed=seed, dtype=tf.float32, alg="philox")
        begin = [self.first_row] + [0] * len(shape)
        mine = whole if self.rows == self.global_batch_size else tf.slice(whole, begin, [self.rows, *shape])
        return tf.cast(mine, keras.config.floatx())


_current: ContextVar[StepContext | None] = ContextVar("current_step", default=None)


def running_step() -> StepContext | None:
    """The step that this replica is in; None outside the loop."""
    return _current.get()


def current_step() -> StepContext:
    """The step that this replica is in; RuntimeError outside the loop."""
    step = running_step()
    if step is None:
        raise RuntimeError("no step is running: a model that asks for current_step() is driven by trainer's own loop")
    return step


@contextmanager
def in_step(step: StepContext) -> Iterator[StepContext]:
    """Makes `step` what current_step() answers within the block, in this thread."""
    token = _current.set(step)
    try:
        yield step
    finally:
        _current.reset(token)
