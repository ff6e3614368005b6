"""Predicts the time of a step from its graph: FLOPs, bytes and operations, by two formulas fitted to one GPU's steps.

Both have the device's part, from the rates of a card's data sheet, and the host's, which starts kernels: plain steps
move the bytes of every operation, and start some kernels for each convolution; compiled ones are products and
convolutions, and little else. `python -m benchmarks.plan_fit` makes the numbers, and their errors. On several GPUs the
graph is that of two replicas, whose batch norm has more operations, and moves more bytes, than TensorFlow's kernel.
CPUs have no formula: their steps are those that were measured where the plan was made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.report.formatting import figures
from deploy.tiers.machine_table import Accelerator, Machine, Rates
from trainer.base.run_files.plan_file import FEW_CHANNELS, StepPlan, Work
from trainer.base.settings.accelerators import arithmetic
from trainer.base.settings.train_config import TrainConfig
from trainer.base.settings.xla_rule import MOST_FLOPS, compiles


@dataclass(frozen=True)
class Interval:
    """Holds a number between two others; the middle is the best guess."""

    low: float
    middle: float
    high: float

    def times(self, factor: float) -> Interval:
        """Returns all three numbers multiplied by a factor."""
        return Interval(self.low * factor, self.middle * factor, self.high * factor)

    def plus(self, other: Interval) -> Interval:
        """Returns the sum, whose ends are the sums of the ends: both may err the same way at once."""
        return Interval(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def product(self, other: Interval) -> Interval:
        """Returns the product of two intervals of positive numbers, whose ends are the products of the ends."""
        return Interval(self.low * other.low, self.middle * other.middle, self.high * other.high)

    def text(self, show: Callable[[float], str] = figures, unit: str = "") -> str:
        """Formats `1.20 (1.00 - 1.50)`, with the unit after the middle."""
        return f"{show(self.middle)}{unit} ({show(self.low)} - {show(self.high)})"


FILE = Path(__file__).with_name("gpu_constants.json")


@dataclass(frozen=True)
class Formula:
    """Holds how a step takes time."""

    products: float  # times the counted seconds of convolutions and products
    others: float  # times those of all other operations
    few_channels: float  # times those of gradients of batch norm over few channels
    operation_seconds: float
    convolution_seconds: float  # more, of each
    step_seconds: float  # more, of each step
    band: Sequence[float]  # factors of a prediction, between which each network was that was not in the fit


@dataclass(frozen=True)
class GpuConstants:
    """Holds what was fitted to one card, and what a GPU holds beside tensors."""

    source: str
    card: str  # the beginning of the names of those like the one that was measured
    plain: Formula
    compiled: Formula
    elsewhere: float  # a factor at both ends of the interval, for what was not measured
    all_reduce_seconds: float  # to start one on one machine: assumed
    context_gib: float  # of CUDA
    workspace_gib: float  # of cuBLAS and cuDNN, which a step cannot do without: assumed
    convolutions_gib: Sequence[float]  # that cuDNN takes for its trials where there is room: usually, and at most
    nccl_gib: float  # buffers, on a machine with several GPUs: assumed


def read_constants(path: Path = FILE) -> GpuConstants:
    """Returns the constants in a file. Raises TypeError for missing or unknown names."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return GpuConstants(**content | {way: Formula(**content[way]) for way in ("plain", "compiled")})


CONSTANTS = read_constants()
NETWORK_SECONDS = 200e-6  # assumed: to start an all-reduce over several machines
SUMMING_DOUBT = Interval(0.5, 1.0, 2.0)
NETWORK_BYTES_PER_SECOND = 2e9  # assumed: 16 Gbit/s, of the smallest machines with a GPU


def device_seconds(work: Work, rows: float, rates: Rates, kind: str, formula: Formula) -> float:
    """Returns the time that one replica's part of a step takes on the device, without all-reduces.

    Of an operation it is that of its FLOPs or of its bytes, the longer one.
    """
    flop_rate, byte_rate = rates.tflops[kind] * 1e12, rates.memory_gb_per_s * 1e9
    share, total = 0.5 if kind == "16_bit" else 1.0, 0.0  # of the bytes that depend on the rows
    # Without tensor cores a product reaches more of the peak: as much as in plain steps, by what is published of V100.
    slower = min(formula.products, CONSTANTS.plain.products) if kind == "float32" else formula.products
    for op in work.operations:
        moved = max(op.moved_bytes.fixed + share * op.moved_bytes.per_row * rows, 0.0) / byte_rate
        if flops := op.flops.at(rows):
            total += op.times * max(slower * flops / flop_rate, formula.products * moved)
        else:
            total += op.times * moved * (formula.few_channels if op.type.endswith(FEW_CHANNELS) else formula.others)
    return total


def host_seconds(work: Work, micro_batches: int, formula: Formula) -> float:
    """Returns the time in which the host starts the kernels of one replica's micro-batches of a step."""
    kernels = formula.operation_seconds * work.count + formula.convolution_seconds * work.convolutions
    return micro_batches * kernels + formula.step_seconds


def all_reduce_seconds(
    work: Work, devices: int, workers: int, link_gb_per_s: float, *, gathered: bool = False, sharded: bool = False
) -> float:
    """Returns the time in which `devices` replicas, on so many machines, sum gradients and batch statistics.

    gathered: each receives those of all others, and adds them itself, as with --virtual_replicas; sharded: each then
    gathers the weights that others updated, as with --shard_optimizer.
    """
    start, rate = (CONSTANTS.all_reduce_seconds, link_gb_per_s * 1e9) if workers == 1 else (
        NETWORK_SECONDS, NETWORK_BYTES_PER_SECOND)  # fmt: skip
    travels = devices - 1 if gathered else 2 * (devices - 1) / devices
    if sharded:  # weights are gathered: half of the way of their gradients' sums
        travels += (devices - 1) / devices
    return (work.all_reduces + sharded) * start + travels * work.reduced_bytes / rate


def step_seconds(
    plan: StepPlan, config: TrainConfig, gpu: Accelerator, devices: int, workers: int = 1
) -> Interval | None:
    """Returns the time of a step on `devices` GPUs, on so many machines, as it will run; None if nothing tells it."""
    work, rates = plan.work if devices == 1 else plan.work_of_two, gpu.rates
    if work is None or rates is None:
        return None
    kind, micro_batches = arithmetic(config, rates.tflops), config.micro_batches_on(devices)
    rows = config.global_batch_size / devices / micro_batches
    formulas = [CONSTANTS.plain]
    if is_compiled(plan, config, devices):  # which made no step slower: convolutions alone say little
        formulas.append(CONSTANTS.compiled)
    parts = [
        (micro_batches * device_seconds(work, rows, rates, kind, formula), host_seconds(work, micro_batches, formula))
        for formula in formulas
    ]
    device, host = min(parts, key=sum)
    # The card, its arithmetic and the number of GPUs that were measured; all else is inferred.
    measured = gpu.name.startswith(CONSTANTS.card) and kind == "tf32" and devices == 1
    wider, (low, high) = 1.0 if measured else CONSTANTS.elsewhere, formulas[-1].band
    # A program of several steps may leave the host nothing to do between them: no GPU has run one.
    least = 0.0 if is_looped(plan, config, devices) else host
    step = Interval(low / wider * (device + least), device + host, high * wider * (device + host))
    ways = {"gathered": config.virtual_replicas > 0, "sharded": config.shard_optimizer}
    summed = all_reduce_seconds(work, devices, workers, rates.link_gb_per_s, **ways)
    return step.plus(SUMMING_DOUBT.times(summed))


# Of a step on another machine's cores: a core of the cloud's older processors, of which two are one real core, is as
# slow; newer kernels, and XLA where TensorFlow has no oneDNN, are faster than the plain steps that were measured.
CPU_DOUBT = Interval(0.4, 1.0, 2.5)


def cpu_step_seconds(plan: StepPlan, config: TrainConfig, machine: Machine, workers: int) -> Interval | None:
    """Returns the time of a step on the CPUs of so many machines, from steps on this one; None if nothing tells it.

    As many times as many cores take from as long to as many times less.
    """
    work = plan.work if workers == 1 else plan.work_of_two
    if work is None or not machine.vcpus or config.precision.startswith("mixed"):  # which was measured in float32
        return None
    micro_batches = config.micro_batches_on(workers)
    here = micro_batches * plan.cpu.seconds.at(config.global_batch_size / workers / micro_batches)
    ratio = plan.cpu.cores / machine.vcpus
    step = CPU_DOUBT.product(Interval(min(ratio, 1.0), math.sqrt(ratio), max(ratio, 1.0))).times(here)
    return step.plus(SUMMING_DOUBT.times(all_reduce_seconds(work, workers, workers, 0.0) if workers > 1 else 0.0))


def is_compiled(plan: StepPlan, config: TrainConfig, devices: int) -> bool:
    """Returns whether XLA will compile the steps of a run on so many GPUs."""
    if devices > 1 and plan.sums_within:
        return False
    return compiles(config, devices, plan.total_steps(config), plan.work.count)


def is_looped(plan: StepPlan, config: TrainConfig, devices: int) -> bool:
    """Returns whether XLA will run many steps in one program."""
    short = plan.work.flops(config.global_batch_size) <= MOST_FLOPS["GPU"]
    return devices == 1 and short and is_compiled(plan, config, 1)
