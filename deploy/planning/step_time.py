"""Predicts the time of a step from the FLOPs, bytes and operations of its graph, by formulas fitted
to one GPU's steps.

There are two formulas, for plain steps and for steps that XLA compiles. Each adds the time of the
device, by the rates of a card's data sheet, and the time of the host, which starts kernels. A plain
step moves the bytes of every operation, and starts several kernels for each convolution; a compiled
step consists mostly of products and convolutions. `python -m benchmarks.plan_fit` fits the numbers
and shows their errors. For several GPUs the graph is that of two replicas, in which batch norm has
more operations, and moves more bytes, than TensorFlow's fused kernel. CPUs have no formula: their
steps were measured on the machine that made the plan.
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
    """Holds a best guess, `middle`, with the lower and the upper end of the interval that the
    number may lie in."""

    low: float
    middle: float
    high: float

    def times(self, factor: float) -> Interval:
        """Returns all three numbers multiplied by a factor."""
        return self.product(Interval(factor, factor, factor))

    def plus(self, other: Interval) -> Interval:
        """Returns the sum.

        Its ends are the sums of the ends, since both numbers may err in the same direction.
        """
        return Interval(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def product(self, other: Interval) -> Interval:
        """Returns the product of two intervals of positive numbers; its ends are the products of
        the ends."""
        return Interval(self.low * other.low, self.middle * other.middle, self.high * other.high)

    def text(self, show: Callable[[float], str] = figures, unit: str = "") -> str:
        """Formats `1.20 (1.00 - 1.50)`, with the unit after the middle."""
        return f"{show(self.middle)}{unit} ({show(self.low)} - {show(self.high)})"


def ideal_to_no_gain(ratio: float) -> Interval:
    """Returns the factors of a time where there are 1 / ratio times the devices: from an ideal gain
    to none."""
    return Interval(min(ratio, 1.0), math.sqrt(ratio), max(ratio, 1.0))


FILE = Path(__file__).with_name("gpu_constants.json")


@dataclass(frozen=True)
class TimeFormula:
    """Holds the fitted numbers of one formula: factors of the device's time, and the host's
    seconds."""

    products: float  # a factor for the counted seconds of convolutions and matrix products
    others: float  # a factor for those of all other operations
    few_channels: float  # a factor for those of batch norm's gradients over few channels
    operation_seconds: float  # the host's time for each operation
    convolution_seconds: float  # its additional time for each convolution
    step_seconds: float  # its additional time for each step
    # factors of a prediction, between which the times of networks outside the fit lay
    band: Sequence[float]


@dataclass(frozen=True)
class GpuConstants:
    """Holds the formulas that were fitted to one card, and the GPU memory that is needed beside
    tensors."""

    source: str
    card: str  # the beginning of the names of the accelerators that count as the measured card
    plain: TimeFormula
    compiled: TimeFormula
    elsewhere: float  # widens both ends of the interval by this factor, for what was not measured
    all_reduce_seconds: float  # assumed: to start an all-reduce on one machine
    context_gib: float  # CUDA's context
    workspace_gib: float  # assumed: workspaces of cuBLAS and cuDNN that a step cannot do without
    # what cuDNN takes, usually and at most, to try kernels if there is room
    convolutions_gib: Sequence[float]
    nccl_gib: float  # assumed: NCCL's buffers, on a machine with several GPUs


def read_constants(path: Path = FILE) -> GpuConstants:
    """Reads the constants from a JSON file. Raises TypeError for missing or unknown names."""
    content = json.loads(path.read_text(encoding="utf-8"))
    formulas = {kind: TimeFormula(**content[kind]) for kind in ("plain", "compiled")}
    return GpuConstants(**content | formulas)


CONSTANTS = read_constants()
NETWORK_SECONDS = 200e-6  # assumed: to start an all-reduce over several machines
SUMMING_DOUBT = Interval(0.5, 1.0, 2.0)  # factors of the predicted time of all-reduces
NETWORK_BYTES_PER_SECOND = 2e9  # assumed: 16 Gbit/s, which the smallest machines with a GPU have


def device_seconds(work: Work, rows: float, rates: Rates, kind: str, formula: TimeFormula) -> float:
    """Returns the device's seconds for one micro-batch of `rows` rows, without all-reduces.

    An operation takes as long as its FLOPs or its memory traffic, whichever is longer. `kind`: the
    arithmetic, a key of `rates.tflops`.
    """
    flop_rate = rates.tflops[kind] * 1e12
    byte_rate = rates.memory_gb_per_s * 1e9
    # In 16 bits the bytes that depend on the rows (activations) are half as many.
    share = 0.5 if kind == "16_bit" else 1.0
    total = 0.0
    # Without tensor cores a product comes closer to the peak rate: as close as in plain steps, by
    # published V100 times.
    slower = formula.products
    if kind == "float32":
        slower = min(slower, CONSTANTS.plain.products)
    for op in work.operations:
        moved = max(op.moved_bytes.fixed + share * op.moved_bytes.per_row * rows, 0.0) / byte_rate
        if flops := op.flops.at(rows):
            # Without weights it is a product of activations, as attention has, which moves large
            # tensors that XLA fuses with nothing.
            weights = op.moved_bytes.fixed > 1
            moves = formula.products if weights else CONSTANTS.plain.products
            total += op.times * max(slower * flops / flop_rate, moves * moved)
        else:
            few = op.type.endswith(FEW_CHANNELS)
            total += op.times * moved * (formula.few_channels if few else formula.others)
    return total


def host_seconds(work: Work, micro_batches: int, formula: TimeFormula) -> float:
    """Returns the host's seconds to start the kernels of all micro-batches of one replica in a
    step."""
    operations = formula.operation_seconds * work.count
    kernels = operations + formula.convolution_seconds * work.convolutions
    return micro_batches * kernels + formula.step_seconds


def all_reduce_seconds(
    work: Work, devices: int, workers: int, link_gb_per_s: float, *, gathered: bool = False
) -> float:
    """Returns the seconds of a step in which `devices` replicas on `workers` machines sum gradients
    and statistics.

    `link_gb_per_s`: of the link between GPUs of one machine. gathered: each replica receives the
        values of all others and adds them itself, as with --virtual_replicas.
    """
    start = CONSTANTS.all_reduce_seconds
    rate = link_gb_per_s * 1e9
    if workers > 1:
        start = NETWORK_SECONDS
        rate = NETWORK_BYTES_PER_SECOND
    transfers = devices - 1 if gathered else 2 * (devices - 1) / devices
    return work.all_reduces * start + transfers * work.reduced_bytes / rate


def step_seconds(
    plan: StepPlan, config: TrainConfig, gpu: Accelerator, devices: int, workers: int = 1
) -> Interval | None:
    """Returns the seconds of a step on `devices` GPUs of `workers` machines; None if graph or rates
    are not known."""
    work = plan.work if devices == 1 else plan.work_of_two
    rates = gpu.rates
    kind = arithmetic(config, rates.tflops) if rates else None
    if work is None or rates is None or not kind:
        return None
    micro_batches = config.micro_batches_on(devices)
    rows = config.global_batch_size / devices / micro_batches
    formulas = [CONSTANTS.plain]
    # XLA made no measured step slower, so the faster prediction counts
    if is_compiled(plan, config, devices):
        formulas.append(CONSTANTS.compiled)
    parts = []
    for formula in formulas:
        on_device = micro_batches * device_seconds(work, rows, rates, kind, formula)
        parts.append((on_device, host_seconds(work, micro_batches, formula)))
    device, host = min(parts, key=sum)
    # Only steps on one GPU of this card with TF32 were measured; all others are inferred, with a
    # wider interval.
    measured = gpu.name.startswith(CONSTANTS.card) and kind == "tf32" and devices == 1
    wider = 1.0 if measured else CONSTANTS.elsewhere
    (low, high) = formulas[-1].band
    # If XLA runs several steps in one program, the host may have nothing to do between them; not
    # measured on a GPU.
    least_host = 0.0 if is_looped(plan, config, devices) else host
    step = Interval(
        low / wider * (device + least_host), device + host, high * wider * (device + host)
    )
    gathered = config.virtual_replicas > 0
    all_reduces = all_reduce_seconds(work, devices, workers, rates.link_gb_per_s, gathered=gathered)
    return step.plus(SUMMING_DOUBT.times(all_reduces))


# Factors of the time of a step on another machine's cores. A vCPU of the cloud's older processors,
# half of a real core, may be as slow as the upper one; newer kernels, and XLA where TensorFlow has
# no oneDNN, may be as fast as the lower.
CPU_DOUBT = Interval(0.4, 1.0, 2.5)


def cpu_step_seconds(
    plan: StepPlan, config: TrainConfig, machine: Machine, workers: int
) -> Interval | None:
    """Returns the seconds of a step on the CPUs of `workers` machines, from the steps that the plan
    measured.

    With N times the cores it is between 1/N of the time and the same time. Returns None if the
    graph or the machine's cores are not known, and for a mixed precision, since the plan's steps
    ran in float32.
    """
    work = plan.work if workers == 1 else plan.work_of_two
    if work is None or not machine.vcpus or config.precision.startswith("mixed"):
        return None
    micro_batches = config.micro_batches_on(workers)
    rows = config.global_batch_size / workers / micro_batches
    measured = micro_batches * plan.cpu.seconds.at(rows)
    step = CPU_DOUBT.product(ideal_to_no_gain(plan.cpu.cores / machine.vcpus)).times(measured)
    if workers > 1:
        step = step.plus(SUMMING_DOUBT.times(all_reduce_seconds(work, workers, workers, 0.0)))
    return step


def is_compiled(plan: StepPlan, config: TrainConfig, devices: int) -> bool:
    """Returns whether XLA will compile the steps of a run on this number of GPUs."""
    if devices > 1 and plan.sums_within:
        return False
    return compiles(config, plan.total_steps(config), plan.work.count)


def is_looped(plan: StepPlan, config: TrainConfig, devices: int) -> bool:
    """Returns whether XLA will run many steps in one program, as it does with small steps on one
    GPU."""
    short = plan.work.flops(config.global_batch_size) <= MOST_FLOPS
    return devices == 1 and short and is_compiled(plan, config, 1)
