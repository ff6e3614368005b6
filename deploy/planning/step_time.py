"""Predicts the time of a step from its graph: FLOPs, bytes and operations, at the rates of a GPU's data sheet.

Each operation takes the longest of its dispatch, its FLOPs and its bytes, read and written by itself. That is no bound:
fused operations move less, and small ones compute below the full rate. On several GPUs the graph is that of two
replicas, whose batch norm has more operations, and moves more bytes, than TensorFlow's kernel for one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from deploy.tiers.machine_table import Rates
from trainer.base.run_files.plan_file import StepPlan, Work
from trainer.base.settings.train_config import TrainConfig


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

    @property
    def half_width(self) -> float:
        """Returns half of the width, relative to the middle of the two ends."""
        return (self.high - self.low) / (self.high + self.low)


FILE = Path(__file__).with_name("gpu_constants.json")


@dataclass(frozen=True)
class GpuConstants:
    """Holds what it takes to start an operation or an all-reduce, and what a GPU holds beside tensors."""

    source: str  # "assumed", or "measured on GPU, DATE"
    launch_seconds: float
    all_reduce_seconds: float  # on one machine
    context_gib: float  # of CUDA
    workspace_gib: float  # of cuDNN and cuBLAS
    nccl_gib: float  # buffers, on a machine with several GPUs


def read_constants(path: Path = FILE) -> GpuConstants:
    """Returns the constants in a file. Raises TypeError for missing or unknown names."""
    return GpuConstants(**json.loads(path.read_text(encoding="utf-8")))


CONSTANTS = read_constants()


NETWORK_SECONDS = 200e-6  # assumed: to start an all-reduce over several machines
NETWORK_BYTES_PER_SECOND = 2e9  # assumed: 16 Gbit/s, of the smallest machines with a GPU
# Measured over counted times: seven published speeds of EfficientNet on two cards were 0.86 to 1.30 times the count
# (benchmarks/published_times.yaml). A tenth more to each side, and twice the most: those networks were compiled by XLA,
# kernels of others, smaller or not fused, may be slower, and nothing that was published says by how much.
BAND = Interval(0.78, 1.5, 2.87)


def arithmetic(config: TrainConfig, rates: Rates) -> str:
    """Returns how a GPU multiplies: "16_bit", "tf32" or "float32"; "" if its rate is not known, as of float64."""
    if config.precision == "float64":
        return ""
    if config.precision == "mixed_bfloat16" and "tf32" not in rates.tflops:  # cards before A100 have no bfloat16
        return "float32"
    if config.precision.startswith("mixed"):
        return "16_bit" if "16_bit" in rates.tflops else "float32"
    return "tf32" if config.tf32 and "tf32" in rates.tflops else "float32"


def compute_seconds(work: Work, rows: float, rates: Rates, kind: str) -> float:
    """Returns the counted time of one replica's part of a step, without all-reduces."""
    flop_rate, byte_rate = rates.tflops[kind] * 1e12, rates.memory_gb_per_s * 1e9
    share = 0.5 if kind == "16_bit" else 1.0  # of the bytes that depend on the rows
    total = 0.0
    for op in work.operations:
        moved = max(op.moved_bytes.fixed + share * op.moved_bytes.per_row * rows, 0.0)
        total += op.times * max(CONSTANTS.launch_seconds, op.flops.at(rows) / flop_rate, moved / byte_rate)
    return total


def all_reduce_seconds(
    work: Work, devices: int, workers: int, rates: Rates, *, gathered: bool = False, sharded: bool = False
) -> float:
    """Returns the time in which `devices` replicas, on so many machines, sum gradients and batch statistics.

    gathered: each receives those of all others, and adds them itself, as with --virtual_replicas; sharded: each then
    gathers the weights that others updated, as with --shard_optimizer.
    """
    start, rate = (CONSTANTS.all_reduce_seconds, rates.link_gb_per_s * 1e9) if workers == 1 else (
        NETWORK_SECONDS, NETWORK_BYTES_PER_SECOND)  # fmt: skip
    travels = devices - 1 if gathered else 2 * (devices - 1) / devices
    if sharded:  # weights are gathered: half of the way of their gradients' sums
        travels += (devices - 1) / devices
    return (work.all_reduces + sharded) * start + travels * work.reduced_bytes / rate


def step_seconds(plan: StepPlan, config: TrainConfig, rates: Rates, devices: int, workers: int = 1) -> Interval | None:
    """Returns the time of a step on `devices` GPUs, on so many machines, with its band; None if nothing tells it."""
    work, passes = plan.work if devices == 1 else plan.work_of_two, config.passes(devices)
    if work is None:
        return None
    rows = config.global_batch_size / devices / passes
    computed = passes * compute_seconds(work, rows, rates, arithmetic(config, rates))
    ways = {"gathered": config.virtual_replicas > 0, "sharded": config.shard_optimizer}
    summed = all_reduce_seconds(work, devices, workers, rates, **ways)
    return BAND.times(computed).plus(Interval(0.5, 1.0, 2.0).times(summed))
