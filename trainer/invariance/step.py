"""Gives a model the context of the current step: its rows of the global batch, and random numbers
for them.

The loop sets the context in each replica; a model's `train_step` reads it by `current_step()`.
Every draw is a function of (seed, step, stream) for the whole global batch, of which a replica
takes its rows, so that a global row gets the same numbers on any number of replicas and in every
precision (drawn in float32, then cast).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.invariance.internals import all_layers, compiled_by_xla, outside_conditions
from trainer.invariance.philox import NORMAL, UNIFORM, Philox, on_host_at_once
from trainer.invariance.virtual_replicas import add_micro_batch, sum_over_replicas

# Keys of StepContext.uses that count the calls of current_step and of accumulate.
ASKED = "current_step"
ACCUMULATED = "accumulate"


class NotCompilable(Exception):
    """Reports why XLA cannot compile a step without changing its numbers."""


# An update of moving averages that waits for all micro-batches: the function that makes it, from
# means over all of them, and this micro-batch's statistics.
Averaged = tuple[Callable[[list[Any]], None], list[Any]]


@dataclass(frozen=True)
class Program:
    """Describes a program of XLA, of one step or several.

    The graph that calls it draws the random numbers of all.
    """

    graph: Any  # that calls it
    steps: Sequence[Any]  # the number of each step, an int64 scalar tensor in that graph
    # which of several steps runs, a tensor in the program; None for a single step
    index: Any = None
    # whether it makes only gradients, which TensorFlow sums before another program makes updates
    gradients_only: bool = False


@dataclass(frozen=True)
class StepContext:
    """Describes one step as one replica runs it."""

    seed: int
    step: Any  # int64 scalar tensor, counted from 0
    first_row: Any  # index in the global batch of this replica's first row, a multiple of `rows`
    rows: int
    global_batch_size: int
    prefix: str = ""  # put before the name of every stream
    micro_batches: int = 1  # into how many `accumulate` cuts the rows
    # fixed shards of the global batch, on any number of replicas; 0: none
    virtual_replicas: int = 0
    micro_batch_number: int = 0  # which micro-batch of this replica runs, from 0
    # in a micro-batch how many there are, of virtual replicas or of this replica; else 1
    micro_batch_count: int = 1
    # the graph in which the step is traced
    graph: Any = field(default_factory=tf.compat.v1.get_default_graph, repr=False)
    # the program of XLA that runs this step, if any
    program: Program | None = field(default=None, repr=False)
    # whether XLA compiles parts of it, between which TensorFlow sums over replicas
    in_parts: bool = False
    # how often each numbered stream was used so far
    uses: Counter[str] = field(default_factory=Counter, repr=False)
    # updates that wait for all micro-batches
    averaged: list[Averaged] = field(default_factory=list, repr=False)
    model: Any = field(default=None, repr=False)  # whose step it is
    copies: int = 1  # how many replicas have these same rows

    @cached_property
    def layers(self) -> list[keras.layers.Layer]:
        """Returns all layers of the model; looking for them at each sum would take long."""
        return all_layers(self.model) if self.model else []

    @property
    def accumulates(self) -> bool:
        """Returns whether `accumulate` cuts the rows into micro-batches.

        Virtual replicas may need a single one.
        """
        return self.micro_batches > 1 or self.virtual_replicas > 0

    @property
    def split(self) -> str:
        """Returns the setting that cuts the rows into micro-batches, for messages."""
        if self.virtual_replicas:
            return f"virtual_replicas={self.virtual_replicas}"
        return f"micro_batches={max(self.micro_batches, self.micro_batch_count)}"

    @property
    def is_part(self) -> bool:
        """Returns whether it has not all rows: on several replicas, or in a micro-batch."""
        return self.rows < self.global_batch_size

    def within(self, name: str) -> "StepContext":
        """Returns the same step with separate streams, which give other numbers."""
        return replace(self, prefix=f"{self.prefix}{name}/")

    def normal(self, shape: Sequence[int], stream: str) -> Any:
        """Returns standard normal numbers, (rows, *shape), in floatx.

        Two draws in one step need two streams.
        """
        return tf.cast(self.draw(NORMAL, shape, stream), keras.config.floatx())

    def uniform(self, shape: Sequence[int], stream: str) -> Any:
        """Returns uniform numbers in [0, 1), (rows, *shape), in floatx."""
        return tf.cast(self.draw(UNIFORM, shape, stream), keras.config.floatx())

    def mean(self, values: Any) -> Any:
        """Returns the sum of `values` divided by the GLOBAL batch size.

        Over all replicas these add up to the mean.
        """
        return tf.reduce_sum(values) / self.global_batch_size

    def accumulate(self, function: Callable[..., Any], *rows: Any) -> Any:
        """Returns the sum of what `function` returns for each of this replica's micro-batches.

        rows: nests of tensors (rows, …) and None, of which a micro-batch gets its part. function:
            takes these and returns a nest of losses, gradients or other tensors that are sums over
            rows; None stays None. While it runs, `current_step()` is the step of its rows, with
            their random numbers. With --virtual_replicas it adds in the fixed order of a binary
            tree, of which each replica has whole branches; `sum_over_replicas` adds these.
        """
        self.uses[ACCUMULATED] += 1
        if not self.accumulates:
            return function(*rows)
        sums: list[tuple[int, Any]] = []  # each with its number of micro-batches
        for number in range(self.micro_batches):
            # A micro-batch begins once the sums so far are there: the memory of the one before is
            # free by then.
            before = tf.nest.flatten(sums[-1][1], expand_composites=True) if sums else []
            with tf.control_dependencies([tf.group(*filter(tf.is_tensor, before))] if sums else []):
                step = self.micro_batch(number)
                with in_step(step):
                    result = function(*tf.nest.map_structure(step.part, rows))
                total = result, [values for _, values in step.averaged]
                add_micro_batch(sums, total, in_tree=self.virtual_replicas > 0)

        # The draws of all micro-batches are counted, and moving averages move once, by the mean.
        self.uses.update(step.uses - self.uses)
        result, averages = sums[0][1]
        for (update, _), values in zip(step.averaged, averages, strict=True):
            totals = sum_over_replicas(values) if self.virtual_replicas else values
            update([total / step.micro_batch_count for total in totals])
        return result

    def micro_batch(self, number: int) -> "StepContext":
        """Returns the context of one micro-batch: that of a replica which has only these rows."""
        rows = self.rows // self.micro_batches
        with on_host_at_once():
            first = self.first_row + number * rows
        return replace(
            self,
            first_row=first,
            rows=rows,
            micro_batches=1,
            micro_batch_number=number,
            micro_batch_count=self.virtual_replicas or self.micro_batches,
            uses=Counter(self.uses),
            averaged=[],
        )

    def part(self, values: Any) -> Any:
        """Returns this micro-batch's rows of `values`, which have the rows of all micro-batches.

        None stays None.
        """
        if values is None:
            return None
        first = self.micro_batch_number * self.rows
        return values[first : first + self.rows]

    def numbered(self, stream: str) -> str:
        """Returns `stream` with the number of this call, so that each call has its own stream."""
        self.uses[self.prefix + stream] += 1
        return f"{stream}/{self.uses[self.prefix + stream]}"

    def draw(self, draw: Any, shape: Sequence[Any], stream: str) -> Any:
        """Returns this replica's rows of what `draw(shape=…, seed=…)` gives for the global batch.

        They are (rows, *shape).
        """

        def rows_of(step: StepContext) -> Any:
            seed = step.stateless_seed(stream)
            if self.is_part and isinstance(draw, Philox):
                part = draw.rows(seed, self.first_row, self.rows, shape)
                if part is not None:
                    return part
            whole = draw(shape=(self.global_batch_size, *shape), seed=seed)
            if not self.is_part:
                return whole
            begin = [self.first_row] + [0] * len(shape)
            return tf.slice(whole, begin, [self.rows] + [-1] * len(shape))

        return self._before_xla(rows_of, stream, draw, shape)

    def draw_for_all(self, draw: Any, shape: Sequence[Any], stream: str) -> Any:
        """Returns what `draw(shape=…, seed=…)` returns, (*shape), the same on all replicas."""
        return self._before_xla(
            lambda step: draw(shape=shape, seed=step.stateless_seed(stream)), stream, draw, shape
        )

    def stateless_seed(self, stream: str) -> Any:
        """Returns the seed of `stream` in this step, as tf.random.stateless_uniform takes it."""
        key = hashlib.blake2b(f"{self.seed}/{self.prefix}{stream}".encode(), digest_size=7).digest()
        with on_host_at_once():  # where some of a GPU's kernels read it
            return tf.stack(
                [tf.constant(int.from_bytes(key, "big"), tf.int64), tf.cast(self.step, tf.int64)]
            )

    def _before_xla(
        self, make: Callable[["StepContext"], Any], stream: str, draw: Any, shape: Sequence[Any]
    ) -> Any:
        """Returns the numbers of `make(step)`.

        Those of a program of XLA are drawn before it, for all its steps. XLA's own kernels give
        other numbers for the same seed. Raises NotCompilable where the numbers cannot be drawn
        before the step, and UserError in a function that XLA compiles by itself.
        """
        if not compiled_by_xla():
            return make(self)
        self.refuse_xla(stream)
        assert self.program
        if outside_conditions(tf.compat.v1.get_default_graph()) is not self.graph:
            raise NotCompilable(
                f"{self.prefix}{stream} draws random numbers inside a loop, or in a function of"
                " its own"
            )
        if any(map(tf.is_tensor, [*shape, *getattr(draw, "keywords", {}).values()])):
            raise NotCompilable(
                f"{self.prefix}{stream} draws random numbers whose number or range the step"
                " computes"
            )
        with self.program.graph.as_default():
            drawn = [make(replace(self, step=step)) for step in self.program.steps]
            numbers = drawn[0] if self.program.index is None else tf.stack(drawn)
        return numbers if self.program.index is None else numbers[self.program.index]

    def refuse_xla(self, stream: str) -> None:
        """Raises UserError in a function that XLA compiles, unless it is the whole step."""
        if compiled_by_xla() and self.program is None:
            raise UserError(
                f"{self.prefix}{stream}: random numbers are drawn in a function that XLA compiles,"
                " which gives other numbers: draw them outside and pass them in, or leave out"
                " jit_compile"
            )


_current: ContextVar[StepContext | None] = ContextVar("current_step", default=None)
Value = TypeVar("Value")


def running_step() -> StepContext | None:
    """Returns the step that this replica runs, or None outside the loop."""
    return _current.get()


def copies_of_rows() -> int:
    """Returns how many replicas have the same rows of the global batch in this step.

    It is more than one in few steps.
    """
    step = running_step()
    return step.copies if step else 1


def parts_on_replicas(replica: Any) -> int:
    """Returns into how many parts replicas divide the global batch of this step.

    `replica`: the context of one.
    """
    return replica.num_replicas_in_sync // copies_of_rows() if replica else 1


def current_step() -> StepContext:
    """Returns the step that this replica runs; raises RuntimeError outside the loop."""
    step = running_step()
    if step is None:
        raise RuntimeError(
            "no step is running: a model that uses current_step() must be trained by trainer's own"
            " loop"
        )
    step.uses[ASKED] += 1
    return step


def in_step(step: StepContext) -> AbstractContextManager[StepContext]:
    """Makes current_step() return `step` within the block, in this thread."""
    return holding(_current, step)


@contextmanager
def holding(variable: ContextVar[Any], value: Value) -> Iterator[Value]:
    """Sets a context variable to `value` within the block, in this thread; yields the value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
