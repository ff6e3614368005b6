"""Says whether a step fits the memory of a tier's devices, and the data its machines."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.planning.step_time import CONSTANTS, Interval, is_looped, step_seconds
from deploy.tiers.machine_table import Accelerator, Machines, load_machines
from deploy.tiers.tier import Tier
from trainer.base.run_files.plan_file import StepPlan, largest_rows, peak_of
from trainer.base.settings.accelerators import arithmetic, lie_on_card, scratch_mib
from trainer.base.settings.train_config import BLOCKS, TrainConfig

GIB = 2**30
USABLE = 0.93  # of what a card is sold with; the driver and its error correction keep the rest
_LEAST = 0.95  # of what a step holds in the order that was traced
# An allocator needs up to so many times as much as it holds. Of 46 limits that were tried 44 are right by this number;
# by a replay of TensorFlow's allocator, in 150 lines, 46 were.
FRAGMENTS = 1.25
_PROCESS_BYTES = 2 * GIB  # assumed: Python and TensorFlow
_IMAGE_BYTES = 30 * GIB  # assumed: container and system, on the disk
FITS, NEAR, TOO_LARGE = "fits", "near", "too large"
# What a setting asks for; the others keep the numbers of every model.
_PROVISO = {"micro_batches": "; other numbers with batch norm; a train_step of yours needs accumulate"}


@dataclass(frozen=True)
class MemoryOption:
    """Holds a setting by which a run surely fits: the bytes that each device then needs less, and its price in time."""

    name: str
    value: int | str
    saved: float
    slower: float | None  # the time of a step over that without it; None: not predicted, as on CPUs

    def __str__(self) -> str:
        time = "" if self.slower is None else f", {self.slower - 1:+.0%} time"
        setting = self.name if self.value is True else f"{self.name}={self.value}"
        return f"--{setting} (-{self.saved / GIB:.1f} GiB{time}{_PROVISO.get(self.name, '')})"


@dataclass(frozen=True)
class Fit:
    """Holds what one device needs and has, in bytes, and the largest global batch that surely fits."""

    verdict: str  # FITS, NEAR or TOO_LARGE
    needed: Interval
    available: float
    largest_batch: int
    options: tuple[MemoryOption, ...]  # of a run that does not surely fit, the best first

    @property
    def words(self) -> str:
        """Returns the numbers in a line."""
        low, high = (f"{value / GIB:.1f}" for value in (self.needed.low, self.needed.high))
        batch = f"a global batch of {self.largest_batch:,} fits" if self.largest_batch else "no batch fits"
        options = f", this one with {' or '.join(map(str, self.options))}" if self.options else ""
        return f"needs {low} - {high} of {self.available / GIB:.1f} GiB; {batch}{options}"


def fit_on(plan: StepPlan, config: TrainConfig, tier: Tier, table: Machines) -> Fit | None:
    """Returns whether the run fits on each device of the tier; None if the memory of its devices is not known."""
    machine, gpu = table.machines.get(tier.machine_type), table.accelerators.get(tier.accelerator_type)
    memory = gpu if tier.accelerators else machine
    if memory is None or (gib := memory.memory_gb) is None:
        return None
    available = USABLE * gib * GIB
    required, micro_batches = _needed(plan, config, tier), config.micro_batches_on(tier.devices)
    verdict = FITS if required.high <= available else TOO_LARGE if required.low > available else NEAR
    limit = (available - 1.5 * _overhead(plan, config, tier)) / (plan.memory.worst_order * FRAGMENTS)
    largest = largest_rows(plan.memory.lines(config, gpu=bool(tier.accelerators)), limit) * micro_batches * tier.devices
    options = [] if verdict == FITS else [*_memory_options(plan, config, tier, gpu, required, available)]
    options.sort(key=lambda option: (option.name in _PROVISO, option.slower or 1.0))  # what keeps the numbers first
    if tier.accelerators and plan.work.convolutions:
        # cuDNN tries kernels with what memory there is, or as much as a job gives it, and does with less: it decides no
        # verdict.
        limit = scratch_mib(gib) * 2**20 or available
        usual, most = (min(part * GIB, limit) for part in CONSTANTS.convolutions_gib)
        middle, high = min(required.middle + usual, available), min(required.high + most, available)
        required = Interval(required.low, max(required.middle, middle), max(required.high, high))
    return Fit(verdict, required, available, largest, tuple(options))


def _memory_options(
    plan: StepPlan, config: TrainConfig, tier: Tier, gpu: Accelerator | None, required: Interval, available: float
) -> Iterator[MemoryOption]:
    """Yields the settings by which the run surely fits, each with the least value that does."""
    rows, micro_batches = config.global_batch_size // tier.devices, config.micro_batches_on(tier.devices)
    finer = [] if config.virtual_replicas else [n for n in range(micro_batches + 1, rows + 1) if rows % n == 0]
    sharded = tier.devices > 1 and plan.slot_bytes and not config.shard_optimizer
    settings: dict[str, Sequence[int | str]] = {
        "micro_batches": finer, "remat": [BLOCKS] if plan.recomputed else [],
        "shard_optimizer": [True] if sharded else [],
    }  # fmt: skip
    timed = gpu if gpu and gpu.rates and arithmetic(config, gpu.rates.tflops) else None
    for name, values in settings.items():
        for value in values:
            changed = plan.with_setting(config, name, value)
            needed = _needed(*changed, tier)
            if needed.high > available:
                continue
            slower = None
            if timed:
                steps = [step_seconds(*run, timed, tier.devices, tier.workers) for run in ((plan, config), changed)]
                slower = steps[1].middle / steps[0].middle if steps[0] and steps[1] else None
            yield MemoryOption(name, value, required.middle - needed.middle, slower)
            break


def _needed(plan: StepPlan, config: TrainConfig, tier: Tier) -> Interval:
    """Returns the bytes that each device of the tier needs."""
    rows = config.global_batch_size // tier.devices / config.micro_batches_on(tier.devices)
    held = peak_of(plan.memory.lines(config, gpu=bool(tier.accelerators)), rows)
    held -= plan.sharded_bytes(config, tier.devices)
    worst = held * plan.memory.worst_order * FRAGMENTS
    return Interval(held * _LEAST, held, worst).plus(Interval(0.5, 1.0, 1.5).times(_overhead(plan, config, tier)))


def _overhead(plan: StepPlan, config: TrainConfig, tier: Tier) -> float:
    """Returns the bytes that a device needs beside the tensors of a micro-batch: of several, the sum of gradients too.

    With --virtual_replicas, sums of 1, 2, 4 … micro-batches, and then the sums of all devices.
    """
    gradients, micro_batches = plan.trained_bytes, config.micro_batches_on(tier.devices)
    summed = gradients * (micro_batches > 1)
    if config.virtual_replicas:
        summed = gradients * max(micro_batches.bit_length(), tier.devices)
    if not tier.accelerators:
        return _PROCESS_BYTES + 2.0 * plan.data_bytes + plan.memory.state_bytes + summed
    several = tier.devices > 1
    # All-reduces are packed into a buffer.
    fixed = (CONSTANTS.context_gib + CONSTANTS.workspace_gib + CONSTANTS.nccl_gib * several) * GIB
    memory = (load_machines().accelerators[tier.accelerator_type].memory_gb or 0) * GIB
    if lie_on_card(plan.data_bytes, memory) and is_looped(plan, config, tier.devices):
        fixed += plan.data_bytes  # lie on the device
    return fixed + summed + gradients * several


def host_problems(plan: StepPlan, tier: Tier, table: Machines) -> Iterator[str]:
    """Yields why the data do not fit the memory or the disk of the tier's machines."""
    machine = table.machines.get(tier.machine_type)
    # In memory once as it was read and once as TensorFlow's tensors; a checkpoint's copy of the state comes on top.
    required = _PROCESS_BYTES + 2 * plan.data_bytes + plan.memory.state_bytes
    if tier.accelerators and machine and machine.memory_gb and required > USABLE * machine.memory_gb * GIB:
        yield (f"the data need {math.ceil(required / GIB)} GiB of the {machine.memory_gb:g} GB of {machine.name}: "
               "prepare them (python -m trainer.data.prepare), and large ones are read row by row")  # fmt: skip
    disk = int(tier.spec["workerPoolSpecs"][0].get("diskSpec", {}).get("bootDiskSizeGb", 100))
    if plan.data_bytes + _IMAGE_BYTES > disk * 1e9:
        yield f"the staged data need {plan.data_bytes / 1e9:.0f} GB of a disk of {disk} GB: raise bootDiskSizeGb"
