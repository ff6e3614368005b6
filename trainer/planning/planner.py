"""Makes the plan of a run: the memory and work of a step as functions of the rows of a replica.

Memory is measured in real steps on one replica, with three numbers of rows, which repeat the first
ones of the data. Every step gets the same tensors, so data set, prefetched batches and iterators,
which a GPU machine keeps on its host, are not counted. Work is counted in the graphs of these steps
and of steps of two replicas, which are traced but not run: FLOPs (of matrix products and
convolutions only, padding included; a multiplication and an addition are two), bytes and
all-reduces. What TensorFlow prunes, or computes once from constants, is not counted.
"""

import dataclasses
import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.run_files.plan_file import (
    FEW_CHANNELS,
    CpuSteps,
    LinearInRows,
    Memory,
    StepPlan,
    StepWork,
    Work,
    peak_of,
    plan_key,
    versions,
)
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import write_whole
from trainer.cluster.strategy import ONE_MACHINE, local_devices, make_replicas
from trainer.data.dataset import Dataset
from trainer.data.sources import load_dataset
from trainer.invariance.gradients import with_tables_as_of
from trainer.invariance.internals import all_layers
from trainer.models.image_layers import as_on_gpus
from trainer.planning.peak_memory import (
    COUNTED,
    Allocation,
    Trace,
    peak_bytes,
    peak_lines,
    sizes_by_rows,
    traced,
    worst_order,
)
from trainer.run.training_setup import set_precision_and_seed, setup_with
from trainer.training.checkpoint import variables_of
from trainer.training.step_operations import NO_KERNEL, ONE_STEP, Operation, operations
from trainer.user_code.interface import ModelInterface

_REPEATED_ROWS = 16  # rows of the data of which all batches are made


class MeasuredStep:
    """Builds a step with `rows` rows on each of `replicas` logical CPUs, and runs it if called.

    It computes in float32 where the run has 16 bits, and without XLA, whose operations differ
    between CPU and GPU.
    """

    def __init__(self, config: TrainConfig, dataset: Dataset, rows: int, replicas: int = 1) -> None:
        rows_of_run = config.global_batch_size / replicas
        precision = "float32" if config.precision.startswith("mixed") else config.precision
        config = dataclasses.replace(
            config,
            global_batch_size=rows * replicas,
            replicas=replicas,
            strategy="auto",
            expect_devices=0,
            precision=precision,
            jit_compile="false",
            micro_batches=1,
            virtual_replicas=0,
        )
        self._times_rows = rows_of_run / rows
        self._synchronizes = config.sync_batch_norm
        set_precision_and_seed(config)
        with as_on_gpus():
            setup = setup_with(config, make_replicas(config), dataset)
        self.model = setup.model
        self.rows = rows
        self.replicas = replicas
        self._steps_run = 0
        self.batches_per_step = ModelInterface.of(setup.model).batches_per_step
        self._runner = setup.step_runner()
        shape = (replicas, self.batches_per_step, rows)  # as `trainer.data.batches` yields them

        def repeated(part: Any) -> Any:
            tensor = tf.convert_to_tensor(part)
            places = tf.range(math.prod(shape)) % tf.shape(tensor)[0]
            return tf.reshape(tf.gather(tensor, places), (*shape, *tensor.shape[1:]))

        parts = tf.nest.map_structure(repeated, dataset.train.first(_REPEATED_ROWS))
        self._rows = iter(tf.data.Dataset.from_tensors(parts).repeat())

    @property
    def graph(self) -> Any:
        """Returns the graph of the loop over steps; traces it if no step has run yet."""
        with as_on_gpus(), with_tables_as_of(self._times_rows):
            return self._runner.traced(self._rows).graph

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of all variables: weights, optimizers' slots and averages."""
        return sum(map(_bytes, variables_of(self.model).values()))

    @property
    def sums_within(self) -> bool:
        """Returns whether a step sums over replicas before its update, as batch norm does."""
        interface = ModelInterface.of(self.model)
        if interface.own_step:
            return not interface.compiles_gradients
        norms = (
            layer
            for layer in all_layers(self.model)
            if isinstance(layer, keras.layers.BatchNormalization)
        )
        return any(
            layer.trainable and (layer.synchronized or self._synchronizes) for layer in norms
        )

    def __call__(self, steps: int = 1) -> None:
        """Runs this many steps."""
        with as_on_gpus():  # the first call traces the graph
            self._runner(self._rows, self._steps_run, steps)
        self._steps_run += steps


def _bytes(variable: Any) -> int:
    return math.prod(map(int, variable.shape)) * int(tf.as_dtype(variable.dtype).size)


_ROWS = (8, 16, 32)  # of the steps that are run
# a step is timed in so many calls, or for so long
_TIMED_CALLS = 5
_TIMED_S = 2.0
_CALL_S = 0.1  # a timed call has steps for this long


@dataclass(frozen=True)
class StepPart:
    """Holds what is known of a step with `rows` rows on each of `replicas` logical CPUs.

    `trace` and `seconds`: only of steps that were run, the latter but for the fewest rows.
    """

    rows: int
    replicas: int
    kernels: Sequence[Operation]  # the operations that run a kernel
    batches_per_step: int
    state_bytes: int
    trained_bytes: int
    sums_within: bool
    trace: Trace | None = None
    seconds: float = 0.0

    @classmethod
    def of(cls, step: MeasuredStep, trace: Trace | None = None, seconds: float = 0.0) -> "StepPart":
        """Returns the part of a step that was built."""
        found = operations(step.graph, ONE_STEP, step.rows)
        return cls(
            rows=step.rows,
            replicas=step.replicas,
            kernels=[op for op in found if op.type not in NO_KERNEL],
            batches_per_step=step.batches_per_step,
            state_bytes=step.state_bytes,
            trained_bytes=sum(map(_bytes, step.model.trainable_variables)),
            sums_within=step.sums_within,
            trace=trace,
            seconds=seconds,
        )

    @classmethod
    def read(cls, file: Path) -> "StepPart":
        """Reads what `write_whole` kept as JSON. Raises what a missing or damaged file does."""
        content = json.loads(file.read_text(encoding="utf-8"))
        kernels = [Operation(**kernel) for kernel in content.pop("kernels")]
        trace = content.pop("trace")
        if trace:
            allocations = [Allocation(**allocation) for allocation in trace.pop("allocations")]
            trace = Trace(**trace, allocations=allocations)
        return cls(**content, kernels=kernels, trace=trace)


def make_plan(config: TrainConfig, kept: Path) -> StepPlan:
    """Measures steps on this machine's CPU and returns the plan.

    kept: a folder for each part that was measured, from which a plan that was stopped goes on.
        Raises UserError for a model or data that fail, or if the steps need more memory than this
        machine has. TensorFlow must not have started in this process yet, as it gets two logical
        CPUs.
    """
    local_devices(
        dataclasses.replace(config, replicas=2, strategy="auto", expect_devices=0), ONE_MACHINE
    )
    set_precision_and_seed(config)
    dataset = load_dataset(config)

    def part(rows: int, replicas: int = 1) -> StepPart:
        file = kept / f"{replicas}-{rows}.json"
        with suppress(Exception):  # it is missing, or damaged in any way
            return StepPart.read(file)
        if replicas > 1:
            log.info(f"traces a step of {replicas} replicas with {rows} rows each")
            made = StepPart.of(MeasuredStep(config, dataset, rows, replicas))
        else:
            step, trace = measure_step(config, dataset, rows)
            made = StepPart.of(step, trace, _seconds_per_step(step) if rows > _ROWS[0] else 0.0)
        kept.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(dataclasses.asdict(made)))
        return made

    first = part(_ROWS[0])
    assert first.trace
    state = first.state_bytes
    # Twice the largest step, for fragmentation and for building the model.
    limit = 2 * peak_bytes(first.trace, state, temporaries=True) * _ROWS[-1] / _ROWS[0]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if limit > memory:
        raise UserError(
            f"a step with {_ROWS[-1]} rows needs up to {limit / 2**30:.1f} GiB, this machine has"
            f" {memory / 2**30:.1f}: make the plan on a larger one (--out), and use it with `python"
            " -m deploy plan --plan=FILE`"
        )
    small, large = map(part, _ROWS[1:])
    assert small.trace
    assert large.trace
    many = large.seconds
    per_row = min(max(many - small.seconds, 0.0) / (large.rows - small.rows), many / large.rows)
    in_memory = tf.nest.flatten(
        [half.arrays for half in (dataset.train, dataset.evaluation) if half]
    )
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    # Without the work of two replicas the rest of the plan still holds.
    work_of_two = None
    try:
        work_of_two = work_by_rows(*(part(rows, 2) for rows in _ROWS[::2]))
    except Exception as error:
        log.info(f"a step of two replicas is not planned: {reason(error)}")
    # The two larger traces give the lines of memory. The order of operations, and the first trace,
    # may exceed them.
    sizes = sizes_by_rows(small.trace, large.trace)
    device = peak_lines(large.trace, sizes, state)
    above = peak_bytes(first.trace, state, temporaries=False) / peak_of(device, first.rows)
    traces = (first.trace, small.trace, large.trace)
    return StepPlan(
        model=config.model,
        data=config.data,
        key=plan_key(config),
        versions=versions(),
        examples=dataset.train.count,
        batches_per_step=first.batches_per_step,
        data_bytes=sum(array.nbytes for array in in_memory),
        memory=Memory(
            device=device,
            device_16_bit=peak_lines(large.trace, sizes, state, half=True),
            cpu=peak_lines(large.trace, sizes, state, temporaries=True),
            state_bytes=state,
            measured_rows=[*_ROWS],
            worst_order=max(above, *(worst_order(trace, state, COUNTED) for trace in traces)),
        ),
        trained_bytes=first.trained_bytes,
        work=work_by_rows(first, large),
        work_of_two=work_of_two,
        sums_within=first.sums_within,
        own_loops=any(op.times != 1 for op in first.kernels),
        cpu=CpuSteps(LinearInRows(many - per_row * large.rows, per_row), cores),
    )


def work_of_replicas(config: TrainConfig, dataset: Dataset, replicas: int) -> Work:
    """Returns each replica's work in a step by its rows; traces steps and runs none."""
    return work_by_rows(
        *(StepPart.of(MeasuredStep(config, dataset, rows, replicas)) for rows in _ROWS[::2])
    )


def measure_step(config: TrainConfig, dataset: Dataset, rows: int) -> tuple[MeasuredStep, Trace]:
    """Builds a step with `rows` rows and runs it in a trace of its memory; returns both."""
    log.info(f"runs some steps of {config.model} with {rows} rows on this CPU")
    return traced(rows, lambda: MeasuredStep(config, dataset, rows))


def _seconds_per_step(step: MeasuredStep) -> float:
    """Returns the seconds of a step, outside of a trace, in the fastest of several calls."""
    times = list[float]()
    count = 1
    while len(times) < _TIMED_CALLS and sum(times) < _TIMED_S:
        began = time.perf_counter()
        worked = time.process_time()
        # on a busy machine the wall time may exceed the processor time of its threads: take the
        # lesser
        step(count)
        times.append(min(time.perf_counter() - began, time.process_time() - worked) / count)
        count = max(1, round(_CALL_S / times[-1]))
    return min(times)


def work_by_rows(small: StepPart, large: StepPart) -> Work:
    """Returns one replica's work as a function of its rows, from steps of two sizes.

    Both steps have equally many replicas, and their graphs have the operations of every one.
    Operations that a graph of several replicas has only once are left out, as the host runs them.
    """

    def line(few: int, many: int) -> LinearInRows:
        per_row = (many - few) / (large.rows - small.rows)
        return LinearInRows(few - per_row * small.rows, per_row)

    counts = Counter[tuple[str, LinearInRows, LinearInRows]]()
    summed = []  # bytes of each all-reduce
    for few, many in zip(small.kernels, large.kernels, strict=True):
        if many.reduced_bytes:
            summed.append(many.reduced_bytes)
        else:
            kind = many.type + FEW_CHANNELS * many.few_channels
            # What runs in a loop is one operation with the FLOPs of all its times.
            counts[kind, line(few.flops, many.flops), line(few.moved_bytes, many.moved_bytes)] += (
                many.times > 0
            )
    work = [
        StepWork(kind, times // large.replicas, flops, moved)
        for (kind, flops, moved), times in counts.items()
        if times >= large.replicas
    ]
    return Work(work, len(summed) // large.replicas, sum(summed) // large.replicas)
