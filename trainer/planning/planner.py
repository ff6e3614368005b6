"""Makes the plan of a run: what a step needs by the rows of a replica.

Memory is that of real steps on one replica, with three numbers of rows. Work is counted in the graphs of these steps,
and in those of two replicas, whose steps are traced and not run.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.run_files.plan_file import Memory, StepPlan, Work, peak_of, plan_key, versions
from trainer.base.settings.train_config import BLOCKS, TrainConfig
from trainer.cluster.strategy import ONE_MACHINE, local_devices
from trainer.data.dataset import Dataset
from trainer.data.examples import AnyExamples
from trainer.data.sources import load_dataset
from trainer.planning.allocations import COUNTED, traced
from trainer.planning.measured_step import MeasuredStep
from trainer.planning.peak_memory import PeakMemory, Trace, peak_bytes, worst_order
from trainer.planning.step_work import work_by_rows
from trainer.run.training_setup import set_precision_and_seed

_ROWS = (8, 16, 32)  # of the steps that are run
Result = TypeVar("Result")


def make_plan(config: TrainConfig) -> StepPlan:
    """Measures steps on this machine's CPU and returns the plan. Raises UserError for a model or data that fail.

    TensorFlow must not have started in this process: it gets two logical CPUs.
    """
    local_devices(dataclasses.replace(config, replicas=2, strategy="auto", expect_devices=0), ONE_MACHINE)
    set_precision_and_seed(config)
    dataset = load_dataset(config)
    first = _measured(config, dataset, _ROWS[0])
    state = first.step.state_bytes
    _check_memory(peak_bytes(first.trace, state, temporaries=True))
    small, large = (_measured(config, dataset, rows) for rows in _ROWS[1:])
    recomputed = None if config.remat else _tried("--remat", lambda: _recomputed(config, dataset))
    return StepPlan(
        model=config.model, data=config.data, key=plan_key(config), versions=versions(),
        examples=dataset.train.count, batches_per_step=first.step.batches_per_step,
        data_bytes=_bytes_of(dataset.train) + _bytes_of(dataset.evaluation),
        memory=_memory(first.trace, small.trace, large.trace, state), trained_bytes=first.step.trained_bytes,
        slot_bytes=[first.step.sharded_bytes(averages=averages) for averages in (True, False)],
        work=work_by_rows(first.step, large.step),
        work_of_two=_tried("a step of two replicas", lambda: work_of_replicas(config, dataset, 2)),
        recomputed=recomputed and recomputed[0],
        recomputed_work=recomputed and recomputed[1],
    )  # fmt: skip


def work_of_replicas(config: TrainConfig, dataset: Dataset, replicas: int) -> Work:
    """Returns what each of so many replicas does in a step, by its rows; nothing is run."""
    return work_by_rows(*(MeasuredStep(config, dataset, rows, replicas) for rows in _ROWS[::2]))


class _Measured(NamedTuple):
    """Holds a step of one number of rows, and what it allocates."""

    step: MeasuredStep
    trace: Trace


def _measured(config: TrainConfig, dataset: Dataset, rows: int) -> _Measured:
    again = ", again with --remat=blocks" if config.remat else ""
    log.info(f"runs some steps of {config.model} with {rows} rows on this CPU{again}")
    built: list[MeasuredStep] = []

    def build() -> MeasuredStep:
        built.append(MeasuredStep(config, dataset, rows))
        return built[0]

    trace = traced(rows, build)
    return _Measured(built[0], trace)


def _recomputed(config: TrainConfig, dataset: Dataset) -> tuple[Memory, Work]:
    """Returns the memory and the work of steps with --remat=blocks."""
    again = dataclasses.replace(config, remat=BLOCKS)
    small, large = (_measured(again, dataset, rows) for rows in _ROWS[1:])
    memory = _memory(small.trace, small.trace, large.trace, large.step.state_bytes)
    return memory, work_by_rows(small.step, large.step)


def _tried(name: str, measure: Callable[[], Result]) -> Result | None:
    """Returns what `measure` does; None if it fails: the plan of plain steps on one replica stands."""
    try:
        return measure()
    except Exception as error:
        log.info(f"{name} is not planned: {reason(error)}")
        return None


def _check_memory(needed: int) -> None:
    """Raises UserError if this machine's memory is too small for the largest step. needed: bytes of the smallest."""
    most, memory = 2 * needed * _ROWS[-1] / _ROWS[0], os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if most > memory:  # with what building the model and fragments add
        raise UserError(
            f"a step with {_ROWS[-1]} rows needs up to {most / 2**30:.1f} GiB, this machine has {memory / 2**30:.1f}: "
            "make the plan on a larger one (--out), and use it with `python -m deploy plan --plan=FILE`"
        )


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
