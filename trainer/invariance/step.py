"""Gives a model the context of the current step: its rows of the global batch, and random numbers for them.

The loop sets the context in each replica; a model's `train_step` reads it by `current_step()`. Every draw is a function
of (seed, step, stream) for the whole global batch, of which a replica takes its rows, so that a global row gets the
same numbers on any number of replicas and in every precision (drawn in float32, then cast).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.invariance.compat import compiled_by_xla, outside_conditions
from trainer.invariance.philox import NORMAL, UNIFORM, Philox, on_host_at_once

# In StepContext.uses: how often the model asked for the step, and how often it accumulated.
ASKED, ACCUMULATED = "current_step", "accumulate"


class NotCompilable(Exception):
    """Reports why XLA cannot compile a step so that its numbers stay the same."""


@dataclass(frozen=True)
class StepContext:
    """Describes one step as one replica runs it."""

    seed: int
    step: Any  # int64 scalar tensor, counted from 0
    first_row: Any  # index in the global batch of this replica's first row, a multiple of `rows`
    rows: int
    global_batch_size: int
    prefix: str = ""  # put before the name of every stream
    micro_batches: int = 1  # passes in which `accumulate` takes the rows
    pass_number: int = 0  # of the pass that runs, from 0
    passes: int = 1  # of which it is one
    graph: Any = field(default_factory=tf.compat.v1.get_default_graph, repr=False)  # in which the step is traced
    around: Any = field(default=None, repr=False)  # the graph that calls it, if XLA compiles the whole step
    uses: Counter[str] = field(default_factory=Counter, repr=False)  # how often each numbered stream was used so far

    @property
    def is_part(self) -> bool:
        """Returns whether its rows are not the whole global batch: on several replicas, and in micro-batches."""
        return self.rows < self.global_batch_size

    def within(self, name: str) -> "StepContext":
        """Returns the same step with separate streams: equal stream names give other numbers than elsewhere."""
        return replace(self, prefix=f"{self.prefix}{name}/")

    def normal(self, shape: Sequence[int], stream: str) -> Any:
        """Returns standard normal numbers, (rows, *shape), in floatx. Two draws in one step need two streams."""
        return tf.cast(self.draw(NORMAL, shape, stream), keras.config.floatx())

    def uniform(self, shape: Sequence[int], stream: str) -> Any:
        """Returns uniform numbers in [0, 1), (rows, *shape), in floatx."""
        return tf.cast(self.draw(UNIFORM, shape, stream), keras.config.floatx())

    def mean(self, values: Any) -> Any:
        """Returns the sum of this replica's rows divided by the GLOBAL batch, so that the replicas' parts add up."""
        return tf.reduce_sum(values) / self.global_batch_size

    def accumulate(self, function: Callable[..., Any], *rows: Any) -> Any:
        """Returns the sum, over the passes of `--micro_batches`, of what `function` returns for the rows of each.

        rows: nests of tensors (rows, …) and None, of which a pass gets its part. function: takes these parts and
        returns a nest of losses, gradients or other tensors that are sums over rows; None stays None. While it runs,
        `current_step()` is the step of its rows, with their random numbers.
        """
        self.uses[ACCUMULATED] += 1
        if self.micro_batches == 1:
            return function(*rows)
        total = None
        for number in range(self.micro_batches):
            # A pass begins once the sums so far are there: the memory of the pass before is free by then.
            with tf.control_dependencies([] if total is None else [_token(total)]):
                step = self._pass(number)
                with in_step(step):
                    result = function(*tf.nest.map_structure(step._part, rows))
                total = result if total is None else tf.nest.map_structure(_added, total, result)
            uses = step.uses
        self.uses.update(uses - self.uses)
        return total

    def _pass(self, number: int) -> "StepContext":
        """Returns the step of the rows of one pass, as that of a replica with these rows."""
        rows = self.rows // self.micro_batches
        with on_host_at_once():
            first = self.first_row + number * rows
        step = replace(self, first_row=first, rows=rows, micro_batches=1, uses=Counter(self.uses))
        return replace(step, pass_number=number, passes=self.micro_batches)

    def _part(self, values: Any) -> Any:
        """Returns this pass's rows of `values`, which hold those of all passes."""
        if values is None:
            return None
        first = self.pass_number * self.rows
        return values[first : first + self.rows]

    def numbered(self, stream: str) -> str:
        """Returns the name of a new stream at each call in one step: `stream` with the number of the call."""
        self.uses[self.prefix + stream] += 1
        return f"{stream}/{self.uses[self.prefix + stream]}"

    def draw(self, draw: Any, shape: Sequence[Any], stream: str) -> Any:
        """Returns this replica's rows, (rows, *shape), of what `draw(shape=…, seed=…)` returns for the global batch."""
        with self.outside_xla(stream, draw, shape):
            seed = self.stateless_seed(stream)
            if self.is_part and isinstance(draw, Philox):
                part = draw.rows(seed, self.first_row, self.rows, shape)
                if part is not None:
                    return part
            whole = draw(shape=(self.global_batch_size, *shape), seed=seed)
            if not self.is_part:
                return whole
            return tf.slice(whole, [self.first_row] + [0] * len(shape), [self.rows] + [-1] * len(shape))

    def draw_for_all(self, draw: Any, shape: Sequence[Any], stream: str) -> Any:
        """Returns what `draw(shape=…, seed=…)` returns, (*shape), the same on all replicas."""
        with self.outside_xla(stream, draw, shape):
            return draw(shape=shape, seed=self.stateless_seed(stream))

    def stateless_seed(self, stream: str) -> Any:
        """Returns the seed of `stream` in this step, as tf.random.stateless_uniform takes it."""
        key = hashlib.blake2b(f"{self.seed}/{self.prefix}{stream}".encode(), digest_size=7).digest()
        with on_host_at_once():  # where some of a GPU's kernels read it
            return tf.stack([tf.constant(int.from_bytes(key, "big"), tf.int64), tf.cast(self.step, tf.int64)])

    @contextmanager
    def outside_xla(self, stream: str, draw: Any = None, shape: Sequence[Any] = ()) -> Iterator[None]:
        """Makes what is drawn in the block an argument of the function that XLA compiles, if it is the whole step.

        XLA's own kernels give other numbers for the same seed. Raises NotCompilable where the numbers cannot be drawn
        before the step, and UserError in another function that XLA compiles.
        """
        if not compiled_by_xla():
            yield
            return
        self.refuse_xla(stream)
        if outside_conditions(tf.compat.v1.get_default_graph()) is not self.graph:
            raise NotCompilable(
                f"{self.prefix}{stream} draws random numbers inside a loop, or in a function of its own"
            )
        if any(map(tf.is_tensor, [*shape, *getattr(draw, "keywords", {}).values()])):
            raise NotCompilable(f"{self.prefix}{stream} draws random numbers whose number or range the step computes")
        with self.around.as_default():
            yield

    def refuse_xla(self, stream: str) -> None:
        """Raises UserError in a function that XLA compiles, unless it is the whole step."""
        if compiled_by_xla() and self.around is None:
            raise UserError(
                f"{self.prefix}{stream}: random numbers are drawn in a function that XLA compiles, where they are "
                "others: draw them outside and pass them in, or leave out jit_compile"
            )


def _token(values: Any) -> Any:
    """Returns an operation that runs when all of `values` are computed."""
    parts = [part for part in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(part)]
    return tf.group(*parts)


def _added(left: Any, right: Any) -> Any:
    """Returns the sum of two gradients or other tensors; None counts as nothing."""
    if left is None or right is None:
        return right if left is None else left
    if isinstance(left, tf.IndexedSlices) and isinstance(right, tf.IndexedSlices):
        values, indices = tf.concat([left.values, right.values], 0), tf.concat([left.indices, right.indices], 0)
        return tf.IndexedSlices(values, indices, left.dense_shape)
    return tf.convert_to_tensor(left) + tf.convert_to_tensor(right)


_current: ContextVar[StepContext | None] = ContextVar("current_step", default=None)


def running_step() -> StepContext | None:
    """Returns the step that this replica runs, or None outside the loop."""
    return _current.get()


def current_step() -> StepContext:
    """Returns the step that this replica runs; raises RuntimeError outside the loop."""
    step = running_step()
    if step is None:
        raise RuntimeError("no step is running: a model that uses current_step() must be trained by trainer's own loop")
    step.uses[ASKED] += 1
    return step


@contextmanager
def in_step(step: StepContext) -> Iterator[StepContext]:
    """Makes current_step() return `step` within the block, in this thread."""
    token = _current.set(step)
    try:
        yield step
    finally:
        _current.reset(token)
