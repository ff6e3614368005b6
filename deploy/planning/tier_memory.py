"""Predicts whether a step fits the memory of a tier's devices, and whether the data fit its
machines."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploy.planning.step_time import CONSTANTS, Interval, is_looped, step_seconds
from deploy.tiers.machine_table import Accelerator, load_machines
from deploy.tiers.tier import Tier
from trainer.base.run_files.plan_file import StepPlan, largest_rows, peak_of
from trainer.base.settings.accelerators import data_fit_on_gpu, scratch_mib
from trainer.base.settings.train_config import TrainConfig

GIB = 2**30
# the usable share of a card's nominal memory; the driver and error correction take the rest
USABLE = 0.93
# the lowest peak of a step, as a share of its peak in the order in which it was traced
_LEAST = 0.95
# The allocator may need this many times the bytes that are in use, because of fragmentation. This
# number decided 44 of 46 tried memory limits correctly; a replay of TensorFlow's allocator, which
# took 150 lines, decided all 46.
FRAGMENTS = 1.25
_PROCESS_BYTES = 2 * GIB  # assumed: Python and TensorFlow
_IMAGE_BYTES = 30 * GIB  # assumed: the container and the system on the disk
FITS = "fits"
NEAR = "near"
TOO_LARGE = "too large"
# Settings that save memory, the one that changes numbers the least first, with what they change or
# ask of a model.
_PROVISOS = {
    "micro_batches": "other numbers with batch norm; a train_step of yours needs accumulate",
    "precision": "other numbers, of 16 bits",
}


@dataclass(frozen=True)
class MemoryOption:
    """Holds a setting with which a run surely fits the memory, with its effect on memory and
    time."""

    name: str
    value: Any
    saved: float  # bytes that each device saves
    # the time of a step, relative to that without the setting; None: not predicted, as on CPUs
    slower: float | None

    def __str__(self) -> str:
        time = "" if self.slower is None else f", {self.slower - 1:+.0%} time"
        return (
            f"--{self.name}={self.value} (-{self.saved / GIB:.1f} GiB{time};"
            f" {_PROVISOS[self.name]})"
        )


@dataclass(frozen=True)
class Fit:
    """Holds the bytes that one device needs and has, and whether the run fits."""

    verdict: str  # FITS, NEAR (it may fit) or TOO_LARGE
    needed: Interval
    available: float
    largest_batch: int  # the largest global batch that surely fits; 0 if none does
    # if the run does not surely fit, the settings that make it fit, the best first
    options: tuple[MemoryOption, ...]

    @property
    def gib(self) -> str:
        """Returns the needed and the available memory, as `1.2 - 3.4 of 22.3`."""
        needed = f"{self.needed.low / GIB:.1f} - {self.needed.high / GIB:.1f}"
        return f"{needed} of {self.available / GIB:.1f}"

    @property
    def words(self) -> str:
        """Returns a line with the needed and available memory, the largest batch and the
        options."""
        some = f"a global batch of {self.largest_batch:,} fits"
        batch = some if self.largest_batch else "no batch fits"
        options = f", this one with {' or '.join(map(str, self.options))}" if self.options else ""
        return f"needs {self.gib} GiB; {batch}{options}"


def fit_on(plan: StepPlan, config: TrainConfig, tier: Tier) -> Fit | None:
    """Returns whether the run fits on each device of the tier; None if the memory of its devices is
    not known."""
    table = load_machines()
    gpu = table.accelerators.get(tier.accelerator_type)
    memory = gpu if tier.accelerators else table.machines.get(tier.machine_type)
    if memory is None or (gib := memory.memory_gb) is None:
        return None
    available = USABLE * gib * GIB
    required = _needed(plan, config, tier)
    micro_batches = config.micro_batches_on(tier.devices)
    verdict = NEAR
    if required.high <= available:
        verdict = FITS
    elif required.low > available:
        verdict = TOO_LARGE
    # The largest batch that surely fits, and the settings with which this one does.
    worst = plan.memory.worst_order * FRAGMENTS
    limit = (available - 1.5 * _overhead(plan, config, tier)) / worst
    most_rows = largest_rows(plan.memory.lines(config, gpu=bool(tier.accelerators)), limit)
    largest = most_rows * micro_batches * tier.devices
    options: list[MemoryOption] = []
    if verdict != FITS:
        options = [*_memory_options(plan, config, tier, gpu, required, available)]
    if tier.accelerators and plan.work.convolutions:
        # cuDNN tries kernels with the memory that is left, or with as much as the job lets it use.
        # It also works with less, so that it is shown as needed but does not change the verdict.
        limit = scratch_mib(gib) * 2**20 or available
        usual, most = (min(part * GIB, limit) for part in CONSTANTS.convolutions_gib)
        middle = min(required.middle + usual, available)
        high = min(required.high + most, available)
        required = Interval(required.low, max(required.middle, middle), max(required.high, high))
    return Fit(verdict, required, available, largest, tuple(options))


def _memory_options(
    plan: StepPlan,
    config: TrainConfig,
    tier: Tier,
    gpu: Accelerator | None,
    required: Interval,
    available: float,
) -> Iterator[MemoryOption]:
    """Yields each setting with which the run surely fits, with the smallest value that is
    enough."""
    rows = config.global_batch_size // tier.devices
    micro_batches = config.micro_batches_on(tier.devices)
    more_micro_batches = [n for n in range(micro_batches + 1, rows + 1) if rows % n == 0]
    has_bfloat16 = gpu and gpu.rates and "tf32" in gpu.rates.tflops
    settings: dict[str, Sequence[Any]] = {
        "micro_batches": [] if config.virtual_replicas else more_micro_batches,
        "precision": ["mixed_bfloat16"] if has_bfloat16 and config.precision == "float32" else [],
    }
    step = step_seconds(plan, config, gpu, tier.devices, tier.workers) if gpu else None
    for name, values in settings.items():
        for value in values:
            changed = replace(config, **{name: value})
            needed = _needed(plan, changed, tier)
            if needed.high > available:
                continue
            other = step_seconds(plan, changed, gpu, tier.devices, tier.workers) if gpu else None
            slower = other.middle / step.middle if step and other else None
            yield MemoryOption(name, value, required.middle - needed.middle, slower)
            break


def _needed(plan: StepPlan, config: TrainConfig, tier: Tier) -> Interval:
    """Returns the bytes that each device of the tier needs for a step, without those for which
    cuDNN tries kernels."""
    rows = config.global_batch_size // tier.devices / config.micro_batches_on(tier.devices)
    peak = peak_of(plan.memory.lines(config, gpu=bool(tier.accelerators)), rows)
    worst = peak * plan.memory.worst_order * FRAGMENTS
    overhead = Interval(0.5, 1.0, 1.5).times(_overhead(plan, config, tier))
    return Interval(peak * _LEAST, peak, worst).plus(overhead)


def _overhead(plan: StepPlan, config: TrainConfig, tier: Tier) -> float:
    """Returns the bytes that a device needs beside the tensors of a micro-batch.

    With several micro-batches this includes the sum of their gradients. With --virtual_replicas it
    includes the sums of 1, 2, 4 … micro-batches or, if these are more, the sums of all devices.
    """
    gradients = plan.trained_bytes
    micro_batches = config.micro_batches_on(tier.devices)
    summed = gradients * (micro_batches > 1)
    if config.virtual_replicas:
        summed = gradients * max(micro_batches.bit_length(), tier.devices)
    if not tier.accelerators:
        return _PROCESS_BYTES + 2.0 * plan.data_bytes + plan.memory.state_bytes + summed
    several = tier.devices > 1
    fixed = (CONSTANTS.context_gib + CONSTANTS.workspace_gib + CONSTANTS.nccl_gib * several) * GIB
    memory = (load_machines().accelerators[tier.accelerator_type].memory_gb or 0) * GIB
    if data_fit_on_gpu(plan.data_bytes, memory) and is_looped(plan, config, tier.devices):
        fixed += plan.data_bytes  # the data are kept on the device
    return fixed + summed + gradients * several  # all-reduces copy the gradients into one buffer


def host_problems(plan: StepPlan, tier: Tier) -> Iterator[str]:
    """Yields a line for each reason why the data do not fit the memory or the disk of the tier's
    machines."""
    machine = load_machines().machines.get(tier.machine_type)
    # The data are in memory twice, as they were read and as TensorFlow's tensors; a checkpoint
    # copies the state.
    required = _PROCESS_BYTES + 2 * plan.data_bytes + plan.memory.state_bytes
    if (
        tier.accelerators
        and machine
        and machine.memory_gb
        and required > USABLE * machine.memory_gb * GIB
    ):
        yield (
            f"the data need {math.ceil(required / GIB)} GiB of the {machine.memory_gb:g} GB of"
            f" {machine.name}: prepare them (python -m trainer.data.prepare), and large ones are"
            " read row by row"
        )
    disk = int(tier.spec["workerPoolSpecs"][0].get("diskSpec", {}).get("bootDiskSizeGb", 100))
    if plan.data_bytes + _IMAGE_BYTES > disk * 1e9:
        yield (
            f"the staged data need {plan.data_bytes / 1e9:.0f} GB of a disk of {disk} GB: raise"
            " bootDiskSizeGb"
        )
