"""Makes the plan of a run: what a step needs by the rows of a replica, from real steps at three numbers of rows."""

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.run_files.plan_file import LinearInRows, Memory, StepPlan, StepWork, peak_of, plan_key, versions
from trainer.base.settings.train_config import BLOCKS, TrainConfig
from trainer.data.dataset import Dataset
from trainer.data.examples import AnyExamples
from trainer.data.sources import load_dataset
from trainer.planning.allocations import COUNTED, traced
from trainer.planning.measured_step import MeasuredStep
from trainer.planning.peak_memory import PeakMemory, Trace, peak_bytes, worst_order
from trainer.planning.step_work import NO_KERNEL, Operation, operations
from trainer.run.training_setup import set_precision_and_seed

_ROWS = (8, 16, 32)  # of the steps that are run


def make_plan(config: TrainConfig) -> StepPlan:
    """Measures steps on this machine's CPU and returns the plan. Raises UserError for a model or data that fail."""
    set_precision_and_seed(config)
    dataset = load_dataset(config)
    first = _measured(config, dataset, _ROWS[0])
    updates, reduced = first.step.updates()
    if config.sync_batch_norm:
        updates += 2 * batch_norms(first.operations)
    state, batches = first.step.state_bytes, first.step.batches_per_step
    _check_memory(peak_bytes(first.trace, state, temporaries=True))
    small, large = (_measured(config, dataset, rows) for rows in _ROWS[1:])
    recomputed, more_flops = _recomputed(config, dataset, large)
    examples, data = dataset.train.count, _bytes_of(dataset.train) + _bytes_of(dataset.evaluation)
    return StepPlan(
        model=config.model, data=config.data, key=plan_key(config), versions=versions(), examples=examples,
        batches_per_step=batches, data_bytes=data, memory=_memory(first.trace, small.trace, large.trace, state),
        work=_work(first, large), all_reduces=updates, reduced_bytes=reduced, recomputed=recomputed,
        recomputed_flops=more_flops,
    )  # fmt: skip


@dataclass(frozen=True)
class _Measured:
    """Holds what a step of one number of rows allocates and computes."""

    step: MeasuredStep
    trace: Trace
    operations: Sequence[Operation]


def _measured(config: TrainConfig, dataset: Dataset, rows: int) -> _Measured:
    log.info(f"runs some steps of {config.model} with {rows} rows on this CPU")
    built: list[MeasuredStep] = []

    def build() -> MeasuredStep:
        built.append(MeasuredStep(config, dataset, rows))
        return built[0]

    trace = traced(rows, build)
    return _Measured(built[0], trace, _operations(built[0].graph, rows))


def _recomputed(config: TrainConfig, dataset: Dataset, plain: _Measured) -> tuple[Memory | None, float]:
    """Returns the memory of steps with --remat=blocks, and their FLOPs over those of `plain`; None without blocks."""
    if config.remat:
        return None, 1.0
    try:
        again = dataclasses.replace(config, remat=BLOCKS)
        small, large = (_measured(again, dataset, rows) for rows in _ROWS[1:])
    except UserError:  # as a plain step has none, the model has no blocks
        return None, 1.0
    except Exception as error:  # nobody asked for it: the plan of plain steps stands
        log.info(f"--remat is not planned: {reason(error)}")
        return None, 1.0
    flops = [sum(op.flops * op.times for op in measured.operations) for measured in (large, plain)]
    return _memory(small.trace, small.trace, large.trace, large.step.state_bytes), flops[0] / max(flops[1], 1)


def _check_memory(needed: int) -> None:
    """Raises UserError if this machine's memory is too small for the largest step. needed: bytes of the smallest."""
    most, memory = 2 * needed * _ROWS[-1] / _ROWS[0], os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if most > memory:  # with what building the model and fragments add
        raise UserError(
            f"a step with {_ROWS[-1]} rows needs up to {most / 2**30:.1f} GiB, this machine has {memory / 2**30:.1f}: "
            "make the plan on a larger one (--out), and use it with `python -m deploy plan --plan=FILE`"
        )


def batch_norms(counted: Sequence[Operation]) -> int:
    """Returns how often batch norm is applied and differentiated: with several replicas it sums once each way.

    On one replica its kernel runs once a group of rows, within the scope of the layer's call.
    """
    return len({op.scope.rpartition("/")[0] for op in counted if op.type == "FusedBatchNormGradV3"})


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


def _operations(graph: Any, rows: int) -> list[Operation]:
    return [op for op in operations(graph, rows=rows) if op.type not in NO_KERNEL]


def _work(small: _Measured, large: _Measured) -> list[StepWork]:
    """Returns the operations with what each needs by the rows, those that are alike together."""
    fewer, more = small.trace.rows, large.trace.rows

    def line(few: int, many: int, times: int) -> LinearInRows:
        per_row = (many - few) / (more - fewer) / times
        return LinearInRows(few / times - per_row * fewer, per_row)

    counts: Counter[tuple[str, LinearInRows, LinearInRows]] = Counter()
    for a, b in zip(small.operations, large.operations, strict=True):
        key = a.type, line(a.flops, b.flops, a.times), line(a.moved_bytes, b.moved_bytes, a.times)
        counts[key] += a.times
    return [StepWork(kind, times, flops, moved) for (kind, flops, moved), times in counts.items()]


def _bytes_of(examples: AnyExamples | None) -> int:
    """Returns the bytes of examples that lie in the host's memory; 0 for those that are read as they are needed."""
    return sum(array.nbytes for array in tf.nest.flatten(examples.arrays)) if examples else 0
