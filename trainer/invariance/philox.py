"""Draws random numbers of any part of a batch alone, bit by bit the same.

They come from TensorFlow's Philox generator (Salmon et al. 2011,
https://doi.org/10.1145/2063384.2063405): a counter gives them, four of 32 bits each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_ALGORITHM = 1  # PHILOX of tf.random.Algorithm
BLOCK = 4  # numbers that one value of the counter gives


@contextmanager
def on_host_at_once() -> Iterator[None]:
    """Places what is made in the block on the host, where it waits for no operation of a device."""
    with tf.control_dependencies(None), tf.device("CPU:0"):
        yield


@dataclass(frozen=True)
class Philox:
    """Draws the numbers of a stateless function of tf.random in fewer operations.

    They are float32 and those of alg="philox".
    """

    operation: Callable[..., Any]

    def __call__(self, shape: Any, seed: Any, skip: Any = 0) -> Any:
        """Returns the numbers of `shape` for `seed`, as tf.random.stateless_normal takes it.

        skip: how many blocks of BLOCK numbers to leave out before them.
        """
        with on_host_at_once():  # where the seed is
            key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
            if tf.is_tensor(skip) or skip:
                counter += tf.stack([tf.cast(skip, tf.uint64), tf.constant(0, tf.uint64)])
        return self.operation(
            shape=shape, key=key, counter=counter, alg=_ALGORITHM, dtype=tf.float32
        )

    def rows(self, seed: Any, first_row: Any, rows: int, shape: Sequence[Any]) -> Any | None:
        """Draws only `rows` rows from `first_row` on, a multiple of it, of a draw of (…, *shape).

        Returns None if these rows may not begin with a block of the counter, or if their size is
        not known.
        """
        lengths = [length if isinstance(length, int) else None for length in shape]
        size = tf.TensorShape(lengths).num_elements()
        if size is None or rows * size % BLOCK:
            return None
        with on_host_at_once():
            skip = tf.cast(first_row, tf.int64) * size // BLOCK
        return self((rows, *shape), seed, skip)


NORMAL = Philox(tf.raw_ops.StatelessRandomNormalV2)


UNIFORM = Philox(tf.raw_ops.StatelessRandomUniformV2)
