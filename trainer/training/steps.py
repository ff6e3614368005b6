"""Runs many steps in one call to the device: a tf.function runs the model's train_step on every
replica.

It also measures how much time the loop over steps lost by waiting for batches.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.log import warn_once
from trainer.base.run_files.job_files import Scalars
from trainer.invariance.gradients import (
    ExchangedGradients,
    Update,
    all_reduce_sum,
    postponed_updates,
)
from trainer.invariance.internals import losses_reduced_by, without_merging
from trainer.invariance.losses import (
    parts_of_batch,
    reduce_over_replicas,
    reduce_to_mean,
    train_step,
)
from trainer.invariance.step import NotCompilable, Program, StepContext, in_step
from trainer.reporting.progress import MetricCounts, StepLogs
from trainer.training.replica_rows import ReplicaData
from trainer.training.step_operations import flops_of
from trainer.user_code.interface import (
    all_metrics,
    metrics_by_key,
    numbers_of,
    recording_results,
    results_of,
    scalars_of,
)

# Operations that give random numbers.
_DRAWS = re.compile(
    "Random|Multinomial|TruncatedNormal|Stateful(Standard|Uniform)|StatelessShuffle|DistortedBoundingBox"
)
Times = npt.NDArray[np.float64]


@dataclass(eq=False)
class StepRunner:
    """Runs steps of `model` on all replicas, on what `iterator` yields: see `trainer.data.batches`.

    compiled: XLA compiles a replica's step; its rows and random numbers are made before it by
        TensorFlow's own kernels, and passed in. On several replicas a compiled step is cut into two
        programs, of gradients and of updates; if the model has its own train_step, XLA compiles
        only what that asks for. steps_per_program: how many steps one program of XLA may run, on
        one replica; `iterator` then yields the rows of so many steps, which begin at a multiple of
        it, or the row numbers by which `gather` gets them on the device.
    """

    model: keras.Model
    data: ReplicaData
    seed: int
    compiled: bool = False
    steps_per_program: int = 1
    gather: Callable[[Any], Any] | None = None
    # a subclass may draw otherwise: set it before the first call
    context: type[StepContext] = StepContext
    # the bytes of rows and random numbers that a compiled step takes, known once it is traced
    bytes_of_step: int = 0

    def __post_init__(self) -> None:
        self.replicas = self.data.replicas
        self._is_divided = self.compiled and self.replicas.count > 1
        self._interface = self.data.interface
        self._names: tuple[str, ...] = ()
        # the results of metrics that a step returns while it is traced
        self._returned: list[tuple[Any, keras.Metric]] = []
        # metrics that a step returns, by the keys that it gives them
        self._by_key: dict[str, keras.Metric] = {}
        self._keys: set[str] = set()  # all keys that a step gives
        # TensorFlow warns of many traces of one function, not of those of partials of it: a script
        # may train many models.
        self._run = tf.function(partial(self._run_steps))
        self._run_program = tf.function(self._run_several, autograph=False)
        # an iterator, and its newest program's number and rows
        self._newest_rows: tuple[Any, int, Any] = (None, -1, None)
        self._graph: Any = None  # of the newest trace

    def __call__(self, iterator: Any, first_step: int, count: int) -> StepLogs:
        """Runs `count` steps from `first_step` (from 0) and returns their scalars.

        Every worker must call it alike.
        """
        with tf.device("CPU:0"):
            begin = tf.constant(first_step, tf.int64)
        # The profiler marks the call as a step.
        with tf.profiler.experimental.Trace("train", step_num=first_step, _r=1):
            if self.steps_per_program > 1:
                steps, requested, ready = self._by_programs(iterator, first_step, count)
            else:
                steps = self._run(iterator, begin, tf.constant(count)).numpy()
                steps, (requested, ready) = steps[:, :-2], steps[:, -2:].T
        waits = np.zeros(self.replicas.cluster.workers)
        waits[self.replicas.cluster.index] = input_wait(
            requested, ready, time.time(), runs_ahead=self.replicas.on_gpus
        )

        # Workers sum once a call, and not once a step, the scalars and the seconds that each lost
        # for batches.
        total = self.replicas.sum_over_workers(np.append(steps, waits))
        values, waited = np.split(total, [steps.size])
        arrays = map(keras.ops.convert_to_numpy, self.model.metrics_variables)
        counts = tuple(array.astype(np.float64) for array in arrays)
        return StepLogs(
            names=self._names,
            values=values.reshape(steps.shape),
            metrics=self._results(counts),
            counts=counts,
            adds_up=self._adds_up,
            results=self._results,
            waits=tuple(waited.tolist()),
        )

    @cached_property
    def flops(self) -> int:
        """Returns the FLOPs of a step over all replicas, after the first call.

        It is 0 where they are not known.
        """
        if not self._graph:
            return 0
        return self.replicas.cluster.workers * flops_of(self._graph, self.replicas.rows)

    def one_step(self, batch: Any, step: Any) -> Any:
        """Returns the scalars of each replica's step number `step`; call it in a graph."""
        with self._scaled_losses():  # around the threads of all replicas
            return tf.autograph.experimental.do_not_convert(self._on_replicas)(batch, step)

    def traced(self, iterator: Any) -> Any:
        """Returns the ConcreteFunction of the loop over steps, which is traced if it is not yet."""
        return self._run.get_concrete_function(iterator, tf.constant(0, tf.int64), tf.constant(0))

    def size(self, iterator: Any) -> int:
        """Returns the number of operations of a step."""
        return len(nodes_of(self.traced(iterator).graph))

    @cached_property
    def _adds_up(self) -> tuple[bool, ...]:
        """Returns whether each counter only adds up over batches, as of Keras's own metrics."""
        may_differ = set()
        for metric in all_metrics(self.model):
            if not type(metric).update_state.__module__.startswith("keras."):
                may_differ |= {id(variable) for variable in metric.variables}
        return tuple(id(counter) not in may_differ for counter in self.model.metrics_variables)

    def _results(self, counts: MetricCounts) -> Scalars:
        """Returns the results of Keras metrics by name, for variables that hold `counts`."""
        if not counts:
            return {}
        pairs = [*zip(self.model.metrics_variables, counts, strict=True)]
        updated = {id(counter) for counter, count in pairs if np.any(count)}
        values = [(counter, tf.cast(count, counter.dtype)) for counter, count in pairs]
        with keras.StatelessScope(values):
            results = results_of(self.model, updated, self._by_key)
        return numbers_of({key: result for key, result in results.items() if key in self._keys})

    def _run_steps(self, iterator: Any, first_step: Any, count: Any) -> Any:
        """Returns the scalars of `count` steps (int32) from `first_step` (int64).

        They are (steps, scalars + 2) float64. The last two are the times, in seconds of the host's
        clock, at which the loop requested the batch and had it.

        On GPUs TensorFlow keeps int32 on the host and int64 on the device. An int64 counter, or
        step number that is not pinned to the host, would make the host wait for the device in every
        step.
        """
        strategy = self.replicas.strategy
        self._graph = tf.compat.v1.get_default_graph()
        scalars = tf.TensorArray(tf.float64, size=count, element_shape=(None,))
        for i in tf.range(count):
            with tf.device("CPU:0"):
                step = first_step + tf.cast(i, tf.int64)
            requested = timestamp(after=step)
            with tf.control_dependencies([requested]):
                batch = next(iterator)
            with tf.device("CPU:0"):
                times = tf.stack([requested, timestamp(after=batch)])
            total = tf.add_n(list(strategy.experimental_local_results(self.one_step(batch, step))))
            scalars = scalars.write(i, tf.concat([total, times], axis=0))
        return scalars.stack()

    def _by_programs(
        self, iterator: Any, first_step: int, count: int
    ) -> tuple[Times, Times, Times]:
        """Runs `count` steps, by programs.

        Returns their scalars, (steps, scalars), and two times for each program. These are when the
        program's rows were requested, and when they were there. The first and the last program may
        run only some of their steps: the others belong to an earlier or a later call. On GPUs a
        program that runs all its steps is a loop of constant length, in which the host need not
        read the counter.
        """
        results = []
        times = []
        size = self.steps_per_program
        for number in range(first_step // size, math.ceil((first_step + count) / size)):
            begin = max(0, first_step - number * size)
            end = min(size, first_step + count - number * size)

            # A program's rows are read once, though two calls may each run a part of it.
            requested = time.time()
            if self._newest_rows[0] is not iterator or self._newest_rows[1] != number:
                self._newest_rows = iterator, number, next(iterator)
            times.append((requested, time.time()))
            bounds = begin, end
            with tf.device("CPU:0"):
                first = tf.constant(number * size, tf.int64)
                if end - begin < size or not self.replicas.on_gpus:
                    bounds = tf.constant(begin, tf.int64), tf.constant(end, tf.int64)
            results.append((self._run_program(self._newest_rows[2], first, *bounds), begin, end))
        requested, ready = np.array(times).T
        return (
            np.concatenate([scalars.numpy()[begin:end] for scalars, begin, end in results]),
            requested,
            ready,
        )

    def _run_several(self, rows: Any, first: Any, begin: Any, end: Any) -> Any:
        """Returns the scalars of a program's steps from `begin` to below `end`.

        They are (steps, scalars) float64. `first` is the number of the program's first step.
        """
        strategy = self.replicas.strategy
        self._graph = tf.compat.v1.get_default_graph()
        with tf.device("CPU:0"):
            steps = [first + number for number in range(self.steps_per_program)]

        def prepared(rows: Any) -> Any:
            batches = self.gather(*rows) if self.gather else rows
            count = self.steps_per_program
            parts = [tf.unstack(part, num=count) for part in tf.nest.flatten(batches)]
            data = []
            for step, *of_step in zip(steps, *parts, strict=True):
                data.append(self._replica_data(tf.nest.pack_sequence_as(batches, of_step), step))
            return tf.nest.map_structure(lambda *parts: tf.stack(parts), *data)

        with self._scaled_losses():
            data = strategy.run(prepared, args=(rows,))
            by_replica = strategy.run(self._program(steps, begin, end), args=(data,))
        (scalars,) = strategy.experimental_local_results(by_replica)  # programs have one replica
        return scalars

    @contextmanager
    def _scaled_losses(self) -> Iterator[None]:
        """Makes Keras's losses in the block add up, or average, to that of the global batch.

        What metrics return there is noted.
        """
        reduced = losses_reduced_by(reduce_to_mean, lambda: 1)
        if not self._interface.means_of_rows:
            replicas = self.replicas
            divided = replicas.micro_batches > 1 or replicas.virtual or replicas.copies > 1
            parts = parts_of_batch if divided else None
            reduced = losses_reduced_by(reduce_over_replicas, parts)
        with reduced, recording_results(self.model) as self._returned:
            yield

    def _on_replicas(self, batch: Any, step: Any) -> Any:
        """Returns the scalars of each replica's step.

        Keras runs train_step without AutoGraph too: a model that needs it would not work in `fit`
        either.
        """
        run = self.replicas.strategy.run
        if self._is_divided and not self._interface.own_step:
            return run(self._divided_step, args=(batch, step))
        # The model's own train_step compiles what needs no sum over replicas.
        if self._is_divided or not self.compiled:
            return run(
                lambda rows, step: self._replica_step(self._replica_data(rows, step), step),
                args=(batch, step),
            )
        data = run(self._replica_data, args=(batch, step))
        return run(self._program([step]), args=(data,))

    def _divided_step(self, batch: Any, step: Any) -> Any:
        """Returns the scalars of this replica's step, by two programs.

        Between them TensorFlow sums the gradients.
        """
        program = Program(tf.compat.v1.get_default_graph(), [step], gradients_only=True)
        updates = list[Update]()
        sizes = list[Any]()

        # The first program returns the gradients, and notes the updates that wait for their sums.
        def gradients(data: Any) -> Any:
            with postponed_updates() as postponed:
                run = partial(self._replica_step, step=step, program=program)
                scalars = self._compilable(run, data)
            updates[:] = postponed
            exchanged = [ExchangedGradients.of(update.gradients) for update in postponed]
            sizes[:] = [gradients.sizes for gradients in exchanged]
            return scalars, [gradients[:2] for gradients in exchanged]

        # The second one makes these updates.
        def update(summed: Any) -> None:
            for pending, (values, rows), table_sizes in zip(updates, summed, sizes, strict=True):
                whole = ExchangedGradients(values, rows, table_sizes).gradients()
                pending.apply(whole, pending.variables, summed=True)

        with without_merging(self.replicas.strategy):
            scalars, parts = tf.function(gradients, jit_compile=True, autograph=False)(
                self._replica_data(batch, step)
            )
        summed = [tuple(map(all_reduce_sum, pair)) for pair in parts]
        with without_merging(self.replicas.strategy):
            tf.function(update, jit_compile=True, autograph=False)(summed)
        return scalars

    def _program(self, steps: Sequence[Any], begin: Any = 0, end: Any = 1) -> Any:
        """Returns a function that XLA compiles, from a replica's data to scalars.

        The data are of one step, or stacked of several. Of several steps it runs those from `begin`
        to below `end`, in a loop.
        """
        graph = tf.compat.v1.get_default_graph()

        def loop(data: Any) -> Any:
            def step_of(index: Any, scalars: Any) -> Any:
                rows = tf.nest.map_structure(lambda part: part[index], data)
                of_step = self._replica_step(rows, steps[0] + index, Program(graph, steps, index))
                return index + 1, scalars.write(tf.cast(index, tf.int32), of_step)

            first = tf.cast(begin, tf.int64)
            scalars = tf.TensorArray(tf.float64, size=len(steps))
            return tf.while_loop(lambda index, _: index < end, step_of, (first, scalars))[1].stack()

        run = loop
        if len(steps) == 1:
            run = partial(self._replica_step, step=steps[0], program=Program(graph, steps))
        return tf.function(partial(self._compilable, run), jit_compile=True, autograph=False)

    def _compilable(self, run: Callable[[Any], Any], data: Any) -> Any:
        """Returns `run(data)` in a program of XLA.

        Raises NotCompilable if XLA would give other numbers.
        """
        # XLA would abort at its next compilation.
        if any(part.dtype == tf.string for part in tf.nest.flatten(data)):
            raise NotCompilable("its data hold text, which XLA cannot take")
        result = run(data)
        inside = tf.compat.v1.get_default_graph()
        values = [tensor for tensor in inside.inputs if tensor.dtype != tf.resource]
        self.bytes_of_step = sum(
            (value.shape.num_elements() or 0) * value.dtype.size for value in values
        )
        if drawn := {node.op for node in nodes_of(inside) if _DRAWS.search(node.op)}:
            raise NotCompilable(
                f"its train_step draws random numbers by {', '.join(sorted(drawn))}, which gives"
                " other numbers in XLA"
            )
        return result

    def _context(self, step: Any, program: Program | None = None) -> StepContext:
        """Returns the context of this step on this replica."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        replicas = self.replicas
        rows = replicas.rows
        copies = replicas.copies
        # If tracing knows the replica's number, the first row is a constant.
        known = tf.get_static_value(replica)
        number = replica if known is None else int(known)
        # Each `copies` consecutive replicas have the same rows.
        first_row = number // copies * rows
        return self.context(
            self.seed,
            step,
            first_row,
            rows,
            replicas.global_batch_size,
            program=program,
            in_parts=self._is_divided,
            micro_batches=replicas.micro_batches,
            virtual_replicas=replicas.virtual,
            model=self.model,
            copies=copies,
        )

    def _replica_data(self, batch: Any, step: Any) -> Any:
        """Returns the data of this replica's step."""
        return self.data.of_step(batch, self._context(step))

    def _replica_step(self, data: Any, step: Any, program: Program | None = None) -> Any:
        """Runs one step on this replica's rows.

        Returns its scalars, in the order of self._names.
        """
        copies = self.replicas.copies
        counters = self.model.metrics_variables if copies > 1 else []
        counts = [*map(tf.convert_to_tensor, counters)]
        with in_step(self._context(step, program)):
            logs = scalars_of(train_step(self.model, data))

        # Metrics are summed over replicas: only the first of those with the same rows counts them.
        for counter, before in zip(counters, counts, strict=True):
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            counter.assign(tf.where(number % copies == 0, tf.convert_to_tensor(counter), before))

        # What is no result of a metric is a scalar, whose mean over an epoch may not be meant.
        self._by_key |= metrics_by_key(logs, self._returned)
        self._keys |= {*logs}
        averaged = self._interface.means_of_rows or not self._interface.own_step
        of_metrics = {*self._by_key, *(metric.name for metric in self.model.metrics)}
        if averaged and (others := sorted(self._keys - of_metrics)):
            warn_once(
                f"{', '.join(others)}: no metric of the model: an epoch has its mean over steps, in"
                " `fit` the value of the last batch: return the result of a keras.metrics.Metric"
            )

        # The numbers of a vector have the names that `numbers_of` gives them.
        scalars: dict[str, Any] = {}
        for name, value in logs.items():
            value = tf.cast(value, tf.float64)
            if value.shape.rank:
                numbers = tf.unstack(tf.reshape(value, [-1]))
                scalars |= {f"{name}_{place}": part for place, part in enumerate(numbers)}
            else:
                scalars[name] = value
        self._names = tuple(sorted(scalars))

        # They are summed over replicas, and over micro-batches where Keras's train_step runs on
        # each.
        parts = copies
        if averaged:
            parts = self.replicas.count
        if averaged and not self._interface.own_step:
            parts *= self.replicas.micro_batches
        return tf.stack([scalars[name] / parts for name in self._names])


def nodes_of(graph: Any) -> list[Any]:
    """Returns the nodes of `graph` and of all functions in it, as NodeDef."""
    graph_def = graph.as_graph_def()
    return [
        *graph_def.node,
        *(node for function in graph_def.library.function for node in function.node_def),
    ]


def timestamp(after: Any) -> Any:
    """Returns the time, by the host's clock in seconds, when all tensors of `after` are there."""
    with tf.init_scope():
        clock = tf.timestamp
        try:
            clock()
        # TensorFlow refuses this operation under enable_op_determinism.
        except tf.errors.FailedPreconditionError:

            def clock() -> Any:
                return tf.ensure_shape(tf.numpy_function(time.time, [], "double"), ())

    with (
        tf.control_dependencies(tf.nest.flatten(after, expand_composites=True)),
        tf.device("CPU:0"),
    ):
        return clock()


def input_wait(requested: Times, ready: Times, end: float, *, runs_ahead: bool) -> float:
    """Returns how many seconds earlier a call would have ended, had no step waited for a batch.

    `requested` and `ready`, (steps,), in seconds of the host's clock: when the host requested each
    batch, and when it had it. `end`: when the last step was done. A CPU finishes a step before it
    asks for the next batch, so the sum of all waits is lost. With `runs_ahead`, on a GPU, the host
    asks for batches while the device still works on earlier steps, and time is lost only while the
    device is idle. The device's time for a step is not measured: all steps are taken to need the
    same time, and it is the longest with which every step can be done at `end`. A step begins once
    its batch is there and the step before it is done, and ends no earlier than the host has started
    its operations.
    """
    if not len(requested):
        return 0.0
    waits = np.maximum(ready - requested, 0.0)
    lost = max(0.0, float(min(np.sum(waits), end - requested[0])))
    if not runs_ahead:
        return lost

    # On a GPU the least time that is lost fits all that the clocks show. The operations of a step
    # have started when the next one is requested; of the last step it is not known.
    started = np.append(requested[1:], ready[-1])
    remaining = np.arange(len(requested), 0, -1.0)  # steps from each one to the last
    device = np.min([*(end - ready) / remaining, *(end - started[:-1]) / (remaining[:-1] - 1)])
    lost_before = np.cumsum(waits)
    by_batch = ready - lost_before + remaining * device
    by_start = started - lost_before + (remaining - 1) * device
    without = np.max([by_batch, by_start])
    return float(np.clip(end - without, 0.0, lost))
