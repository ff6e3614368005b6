"""Predicts the time of a step from its graph: FLOPs, bytes and operations, at the rates of a GPU's data sheet.

Each operation takes the longest of its dispatch, its FLOPs and its bytes, read and written by itself. That is no bound:
fused operations move less, and small ones compute below the full rate. published.yaml says how far real GPUs were off.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from deploy.planning.gpu_constants import CONSTANTS
from deploy.planning.interval import Interval
from deploy.planning.scaling import PUBLISHED
from deploy.tiers.machine_table import Rates
from trainer.base.run_files.plan_file import StepPlan
from trainer.base.settings.train_config import TrainConfig
from trainer.base.settings.yaml_file import read_yaml

NETWORK_SECONDS = 200e-6  # assumed: to start an all-reduce over several machines
NETWORK_BYTES_PER_SECOND = 2e9  # assumed: 16 Gbit/s, of the smallest machines with a GPU
# The published networks were compiled by XLA; kernels of others, smaller or not fused, may be slower. Assumed: nothing
# that was published says by how much.
_SLOWER, _MARGIN = 2.0, 1.1
_CARD_MARGIN = 1.25  # of the ratio of two cards, which two networks alone show
_SAME_CARD = 1.25  # assumed: the counted effect of more devices of one card, either way


@dataclass(frozen=True)
class Published:
    """Holds a training speed that others measured, and what counting its graph gives."""

    variant: str
    precision: str
    gpu: str
    images_per_second: float
    counted_images_per_second: float

    @property
    def network(self) -> str:
        """Returns what is the same on two cards: the variant, and whether its precision has 16 bits."""
        return f"{self.variant} {'mixed' if self.precision == 'mixed' else 'single'}"

    @property
    def slower(self) -> float:
        """Returns the measured time over the counted one."""
        return self.counted_images_per_second / self.images_per_second


def arithmetic(config: TrainConfig, rates: Rates) -> str:
    """Returns how a GPU multiplies: "16_bit", "tf32" or "float32"; "" if its rate is not known, as of float64."""
    if config.precision == "float64":
        return ""
    if config.precision == "mixed_bfloat16" and "tf32" not in rates.tflops:  # cards before A100 have no bfloat16
        return "float32"
    if config.precision.startswith("mixed"):
        return "16_bit" if "16_bit" in rates.tflops else "float32"
    return "tf32" if config.tf32 and "tf32" in rates.tflops else "float32"


def compute_seconds(plan: StepPlan, rows: float, rates: Rates, kind: str) -> float:
    """Returns the counted time of one replica's part of a step, without all-reduces."""
    flop_rate, byte_rate = rates.tflops[kind] * 1e12, rates.memory_gb_per_s * 1e9
    share = 0.5 if kind == "16_bit" else 1.0  # of the bytes that depend on the rows
    total = 0.0
    for work in plan.work:
        moved = max(work.moved_bytes.fixed + share * work.moved_bytes.per_row * rows, 0.0)
        total += work.times * max(CONSTANTS.launch_seconds, work.flops.at(rows) / flop_rate, moved / byte_rate)
    return total


def _passes_seconds(plan: StepPlan, config: TrainConfig, rates: Rates, devices: int) -> float:
    """Returns the counted time of one replica's part of a step in all its passes."""
    rows = config.global_batch_size / devices / config.micro_batches
    return config.micro_batches * compute_seconds(plan, rows, rates, arithmetic(config, rates))


def all_reduce_seconds(plan: StepPlan, devices: int, workers: int, rates: Rates) -> float:
    """Returns the time in which `devices` replicas, on so many machines, sum gradients and batch statistics."""
    if devices == 1:
        return 0.0
    start, rate = (CONSTANTS.all_reduce_seconds, rates.link_gb_per_s * 1e9) if workers == 1 else (
        NETWORK_SECONDS, NETWORK_BYTES_PER_SECOND)  # fmt: skip
    return plan.all_reduces * start + 2 * (devices - 1) / devices * plan.reduced_bytes / rate


def step_seconds(
    plan: StepPlan, config: TrainConfig, rates: Rates, devices: int, workers: int = 1,
    errors: Interval | None = None,
) -> Interval:  # fmt: skip
    """Returns the time of a step on `devices` GPUs, on so many machines, with its band.

    `errors`: measured over counted times, by default those of `calibrated`.
    """
    computed = _passes_seconds(plan, config, rates, devices)
    summed = all_reduce_seconds(plan, devices, workers, rates)
    band = (errors or calibrated(published())).times(computed)
    return Interval(band.low + summed / 2, band.middle + summed, band.high + 2 * summed)


def calibrated(known: Iterable[Published]) -> Interval:
    """Returns the measured time over the counted one, from the least that was published to _SLOWER times the most."""
    slower = [speed.slower for speed in known]
    low, high = min(slower) / _MARGIN, max(slower) * _MARGIN * _SLOWER
    return Interval(low, math.sqrt(low * high), high)


def between_cards(known: Iterable[Published]) -> Interval:
    """Returns the measured ratio of two cards' times over the counted one: what is left if one of them was measured."""
    by_network: dict[str, list[float]] = {}
    for speed in known:
        by_network.setdefault(speed.network, []).append(speed.slower)
    most = max(max(slower) / min(slower) for slower in by_network.values()) * _CARD_MARGIN
    return Interval(1 / most, 1.0, most)


def ratio(
    plan: StepPlan, config: TrainConfig, here: tuple[Rates, int, int], there: tuple[Rates, int, int]
) -> Interval | None:
    """Returns the time of a step `there` over that `here`, each as rates, devices and machines.

    None if a rate is not known. With the same card, only the number of devices makes it uncertain.
    """
    if not all(arithmetic(config, rates) for rates, _, _ in (here, there)):
        return None

    def seconds(rates: Rates, devices: int, workers: int) -> float:
        return _passes_seconds(plan, config, rates, devices) + all_reduce_seconds(plan, devices, workers, rates)

    counted = seconds(*there) / seconds(*here)
    error = between_cards(published())
    if here[0] == there[0]:
        ideal = here[1] / there[1]
        low, high = sorted((ideal, 1.0))
        return Interval(max(low, counted / _SAME_CARD), counted, min(max(high, counted), counted * _SAME_CARD))
    return error.times(counted)


@cache
def published() -> tuple[Published, ...]:
    """Returns the training speeds of one GPU in published.yaml."""
    rows: list[Mapping[str, Any]] = read_yaml(PUBLISHED, PUBLISHED.name)["efficientnet"]
    return tuple(
        Published(row["variant"], row["precision"], row["gpu"], row["images_per_second"], row["counted"])
        for row in rows
    )
