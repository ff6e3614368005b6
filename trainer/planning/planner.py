"""Makes the plan of a run: what a step needs by the rows of a replica.

Memory is that of real steps on one replica, with three numbers of rows, which repeat the first ones of the data. Data
set, prefetched batches and iterators, which stay on the host of a GPU, are none of what a step allocates: every step
gets the same tensors. Work is counted in the graphs of these steps, and in those of two replicas, whose steps are
traced and not run: FLOPs, of matrix products and convolutions alone, padding included, where a multiplication and an
addition are two; bytes; all-reduces. What TensorFlow prunes, or computes once from constants, is not counted.
"""

import dataclasses
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

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
from trainer.base.settings.train_config import BLOCKS, TrainConfig
from trainer.cluster.strategy import ONE_MACHINE, local_devices, make_replicas
from trainer.data.dataset import Dataset
from trainer.data.examples import AnyExamples
from trainer.data.sources import load_dataset
from trainer.invariance.gradients import optimizers_of, with_tables_as_of
from trainer.invariance.internals import all_layers
from trainer.invariance.sharded_slots import slots_to_shard
from trainer.models.image_layers import as_on_gpus
from trainer.planning.peak_memory import COUNTED, PeakMemory, Trace, peak_bytes, traced, worst_order
from trainer.run.training_setup import set_precision_and_seed, setup_with
from trainer.training.checkpoint import variables_of
from trainer.training.step_operations import NO_KERNEL, Operation, operations
from trainer.user_code.interface import ModelInterface

_REPEATED_ROWS = 16


class MeasuredStep:
    """Builds the model and the step of one number of rows on each of so many logical CPUs.

    In float32 where the run's precision has 16 bits, and without XLA: its operations on a CPU are not those on a GPU.
    """

    def __init__(self, config: TrainConfig, dataset: Dataset, rows: int, replicas: int = 1) -> None:
        rows_of_run = config.global_batch_size / replicas
        precision = "float32" if config.precision.startswith("mixed") else config.precision
        config = dataclasses.replace(
            config, global_batch_size=rows * replicas, replicas=replicas, strategy="auto", expect_devices=0,
            precision=precision, jit_compile="false", micro_batches=1, virtual_replicas=0, shard_optimizer=False,
        )  # fmt: skip
        self._times_rows, self._synchronizes = rows_of_run / rows, config.sync_batch_norm
        set_precision_and_seed(config)
        with as_on_gpus():
            setup = setup_with(config, make_replicas(config), dataset)
        self.model, self.rows, self.replicas, self._made = setup.model, rows, replicas, 0
        self.batches_per_step = ModelInterface.of(setup.model).batches_per_step
        self._runner = setup.step_runner()
        shape = (replicas, self.batches_per_step, rows)  # of what `trainer.data.batches` yields

        def repeated(part: Any) -> Any:
            tensor = tf.convert_to_tensor(part)
            places = tf.range(math.prod(shape)) % tf.shape(tensor)[0]
            return tf.reshape(tf.gather(tensor, places), (*shape, *tensor.shape[1:]))

        parts = tf.nest.map_structure(repeated, dataset.train.first(_REPEATED_ROWS))
        self._rows = iter(tf.data.Dataset.from_tensors(parts).repeat())

    @property
    def graph(self) -> Any:
        """Returns the graph of the loop over steps, traced now if no step was run yet."""
        with as_on_gpus(), with_tables_as_of(self._times_rows):
            return self._runner.traced(self._rows).graph

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of all variables: weights, optimizers, averages."""
        return sum(map(_bytes, variables_of(self.model).values()))

    @property
    def trained_bytes(self) -> int:
        """Returns the bytes of the weights that have gradients."""
        return sum(map(_bytes, self.model.trainable_variables))

    @property
    def sums_within(self) -> bool:
        """Returns whether a step on several replicas sums over them before its update, as batch norm over all rows."""
        interface = ModelInterface.of(self.model)
        if interface.own_step:
            return not interface.compiles_gradients
        norms = (layer for layer in all_layers(self.model) if isinstance(layer, keras.layers.BatchNormalization))
        return any(layer.trainable and (layer.synchronized or self._synchronizes) for layer in norms)

    def sharded_bytes(self) -> int:
        """Returns the bytes of which --shard_optimizer keeps 1/N on each of N replicas; 0 if it is refused."""
        try:
            return sum(
                _bytes(slot) for optimizer in optimizers_of(self.model)
                for slot, _ in slots_to_shard(optimizer, 2)
            )  # fmt: skip
        except UserError:
            return 0

    def __call__(self, steps: int = 1) -> None:
        """Runs steps."""
        with as_on_gpus():  # the first call traces
            self._runner(self._rows, self._made, steps)
        self._made += steps


def _bytes(variable: Any) -> int:
    return math.prod(map(int, variable.shape)) * int(tf.as_dtype(variable.dtype).size)


_ROWS = (8, 16, 32)  # of the steps that are run
_LOOPS = (1, 0, 0, 0)  # how often each loop is counted: that of the steps, and a model's own within it
_TIMED_CALLS, _TIMED_S, _CALL_S = 5, 2.0, 0.1
Result = TypeVar("Result")


def make_plan(config: TrainConfig) -> StepPlan:
    """Measures steps on this machine's CPU and returns the plan. Raises UserError for a model or data that fail.

    TensorFlow must not have started in this process: it gets two logical CPUs.
    """
    local_devices(dataclasses.replace(config, replicas=2, strategy="auto", expect_devices=0), ONE_MACHINE)
    set_precision_and_seed(config)
    dataset = load_dataset(config)
    first, first_trace = _measured(config, dataset, _ROWS[0])
    state = first.state_bytes
    needed = peak_bytes(first_trace, state, temporaries=True)
    most, memory = 2 * needed * _ROWS[-1] / _ROWS[0], os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if most > memory:  # with what building the model and fragments add to the largest step
        raise UserError(
            f"a step with {_ROWS[-1]} rows needs up to {most / 2**30:.1f} GiB, this machine has {memory / 2**30:.1f}: "
            "make the plan on a larger one (--out), and use it with `python -m deploy plan --plan=FILE`"
        )
    (small_step, small), (large_step, large) = (_measured(config, dataset, rows) for rows in _ROWS[1:])
    few, many = map(_seconds, (small_step, large_step))
    per_row = min(max(many - few, 0.0) / (large.rows - small.rows), many / large.rows)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    recomputed = None if config.remat else _tried("--remat", lambda: _recomputed(config, dataset))
    return StepPlan(
        model=config.model, data=config.data, key=plan_key(config), versions=versions(),
        examples=dataset.train.count, batches_per_step=first.batches_per_step,
        data_bytes=_bytes_of(dataset.train) + _bytes_of(dataset.evaluation),
        memory=_memory(first_trace, small, large, state), trained_bytes=first.trained_bytes,
        slot_bytes=first.sharded_bytes(),
        work=work_by_rows(first, large_step),
        work_of_two=_tried("a step of two replicas", lambda: work_of_replicas(config, dataset, 2)),
        sums_within=first.sums_within, own_loops=not all(op.times for op in _counted(first)),
        cpu=CpuSteps(LinearInRows(many - per_row * large.rows, per_row), cores),
        recomputed=recomputed and recomputed[0],
        recomputed_work=recomputed and recomputed[1],
    )  # fmt: skip


def work_of_replicas(config: TrainConfig, dataset: Dataset, replicas: int) -> Work:
    """Returns what each of so many replicas does in a step, by its rows; nothing is run."""
    return work_by_rows(*(MeasuredStep(config, dataset, rows, replicas) for rows in _ROWS[::2]))


def _measured(config: TrainConfig, dataset: Dataset, rows: int) -> tuple[MeasuredStep, Trace]:
    again = ", again with --remat=blocks" if config.remat else ""
    log.info(f"runs some steps of {config.model} with {rows} rows on this CPU{again}")
    built: list[MeasuredStep] = []

    def build() -> MeasuredStep:
        built.append(MeasuredStep(config, dataset, rows))
        return built[0]

    trace = traced(rows, build)
    return built[0], trace


def _seconds(step: MeasuredStep) -> float:
    """Returns the seconds of a step outside of a trace: the least of calls, of several steps where these are short."""
    times, count = list[float](), 1
    while len(times) < _TIMED_CALLS and sum(times) < _TIMED_S:
        began, worked = time.perf_counter(), time.process_time()
        step(count)  # on a busy machine it lasts longer than its threads work
        times.append(min(time.perf_counter() - began, time.process_time() - worked) / count)
        count = max(1, round(_CALL_S / times[-1]))
    return min(times)


def _recomputed(config: TrainConfig, dataset: Dataset) -> tuple[Memory, Work]:
    """Returns the memory and the work of steps with --remat=blocks."""
    again = dataclasses.replace(config, remat=BLOCKS)
    (small, small_trace), (large, large_trace) = (_measured(again, dataset, rows) for rows in _ROWS[1:])
    return _memory(small_trace, small_trace, large_trace, large.state_bytes), work_by_rows(small, large)


def _tried(name: str, measure: Callable[[], Result]) -> Result | None:
    """Returns what `measure` does; None if it fails: the plan of plain steps on one replica stands."""
    try:
        return measure()
    except Exception as error:
        log.info(f"{name} is not planned: {reason(error)}")
        return None


def _memory(first: Trace, small: Trace, large: Trace, state: int) -> Memory:
    """Returns the lines of memory, from the two larger traces, and how far the order and the first one are off."""
    predicted = PeakMemory(small, large, state)
    device = predicted.device_lines()
    above = peak_bytes(first, state, temporaries=False) / peak_of(device, first.rows)
    return Memory(
        device=device, device_16_bit=predicted.device_lines(half=True), cpu=predicted.cpu_lines(), state_bytes=state,
        measured_rows=[first.rows, small.rows, large.rows],
        worst_order=max(above, *(worst_order(trace, state, COUNTED) for trace in (first, small, large))),
    )  # fmt: skip


def _bytes_of(examples: AnyExamples | None) -> int:
    """Returns the bytes of examples that lie in the host's memory; 0 for those that are read as they are needed."""
    return sum(array.nbytes for array in tf.nest.flatten(examples.arrays)) if examples else 0


def work_by_rows(small: MeasuredStep, large: MeasuredStep) -> Work:
    """Returns what a replica does in a step by its rows, from steps of two numbers of rows on as many replicas.

    The graph has the operations of each replica; those beside them, on the host, are left out where there are several.
    """

    def line(few: int, many: int) -> LinearInRows:
        per_row = (many - few) / (large.rows - small.rows)
        return LinearInRows(few - per_row * small.rows, per_row)

    counts, pairs = (
        Counter[tuple[str, LinearInRows, LinearInRows]](),
        zip(_counted(small), _counted(large), strict=True),
    )
    summed = list[int]()
    for few, many in pairs:
        if many.reduced_bytes:
            summed.append(many.reduced_bytes)
        else:
            kind = many.type + FEW_CHANNELS * many.few_channels
            counts[kind, line(few.flops, many.flops), line(few.moved_bytes, many.moved_bytes)] += many.times
    work = [
        StepWork(kind, times // large.replicas, flops, moved)
        for (kind, flops, moved), times in counts.items() if times >= large.replicas
    ]  # fmt: skip
    return Work(work, len(summed) // large.replicas, sum(summed) // large.replicas)


def _counted(step: MeasuredStep) -> list[Operation]:
    return [op for op in operations(step.graph, _LOOPS, step.rows) if op.type not in NO_KERNEL]
