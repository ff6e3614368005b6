"""Says whether a step fits the memory of a tier's devices, and the data its machines."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.planning.gpu_constants import CONSTANTS
from deploy.planning.interval import Interval
from deploy.tiers.machine_table import Machines
from deploy.tiers.tier import Tier
from trainer.base.run_files.plan_file import LinearInRows, Memory, StepPlan, largest_rows, peak_of
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


@dataclass(frozen=True)
class Fit:
    """Holds what one device needs and has, in bytes, and the largest global batch that surely fits."""

    verdict: str  # FITS, NEAR or TOO_LARGE
    needed: Interval
    available: float
    largest_batch: int
    micro_batches: int | None  # the least number of passes, from that of the run on, that surely fits; None: none does
    remat: float | None = None  # how much more a step computes with --remat=blocks, if it surely fits by that

    @property
    def words(self) -> str:
        """Returns the numbers in a line."""
        low, high = (f"{value / GIB:.1f}" for value in (self.needed.low, self.needed.high))
        batch = f"a global batch of {self.largest_batch:,} fits" if self.largest_batch else "no batch fits"
        levers = [f"--micro_batches={self.micro_batches}"] if self.micro_batches else []
        levers += [f"--remat={BLOCKS} (+{self.remat - 1:.0%} FLOPs)"] if self.remat else []
        if self.verdict != FITS and levers:
            batch += f", this one with {' or '.join(levers)}"
        return f"needs {low} - {high} of {self.available / GIB:.1f} GiB; {batch}"


def fit_on(plan: StepPlan, config: TrainConfig, tier: Tier, table: Machines) -> Fit | None:
    """Returns whether the run fits on each device of the tier; None if the memory of its devices is not known."""
    available = available_bytes(tier, table)
    if available is None:
        return None
    memory = plan.memory
    gpu, mixed = bool(tier.accelerators), config.precision.startswith("mixed")
    rows = config.global_batch_size // tier.devices

    def lines_of(memory: Memory) -> Sequence[LinearInRows]:
        return (memory.device_16_bit if mixed else memory.device) if gpu else memory.cpu

    def needed(passes: int, memory: Memory = memory) -> Interval:
        lines, worst = lines_of(memory), memory.worst_order * FRAGMENTS
        held, beside = peak_of(lines, rows / passes), _beside(plan, config, tier, passes)
        return Interval(held * _LEAST, held, held * worst).plus(Interval(0.5, 1.0, 1.5).times(beside))

    asked = config.passes(tier.devices)
    wanted = needed(asked)
    verdict = FITS if wanted.high <= available else TOO_LARGE if wanted.low > available else NEAR
    most = (available - 1.5 * _beside(plan, config, tier, asked)) / (memory.worst_order * FRAGMENTS)
    largest = largest_rows(lines_of(memory), most) * asked * tier.devices
    passes = (count for count in range(asked, rows + 1) if rows % count == 0 and not config.virtual_replicas)
    fitting = next((count for count in passes if needed(count).high <= available), None)
    again = plan.recomputed and needed(asked, plan.recomputed).high <= available
    return Fit(verdict, wanted, available, largest, fitting, plan.recomputed_flops if again else None)


def _beside(plan: StepPlan, config: TrainConfig, tier: Tier, passes: int) -> float:
    """Returns the bytes that a device needs beside the tensors of a pass: with several, their sum of gradients too.

    With --virtual_replicas, sums of 1, 2, 4 … passes, and then the sums of all devices.
    """
    gradients = plan.trained_bytes
    summed = gradients * (passes > 1)
    if config.virtual_replicas:
        summed = gradients * max(passes.bit_length(), tier.devices)
    if not tier.accelerators:
        return _PROCESS_BYTES + 2.0 * plan.data_bytes + plan.memory.state_bytes + summed
    several = tier.devices > 1
    # All-reduces are packed into a buffer.
    fixed = (CONSTANTS.context_gib + CONSTANTS.workspace_gib + CONSTANTS.nccl_gib * several) * GIB
    return fixed + summed + gradients * several


def available_bytes(tier: Tier, table: Machines) -> float | None:
    """Returns the memory of one GPU of the tier or, without GPUs, of one machine, that programs can use."""
    if tier.accelerators:
        gib = table.accelerators[tier.accelerator_type].memory_gb
        return None if gib is None else USABLE * gib * GIB
    machine = table.machines.get(tier.machine_type)
    return None if machine is None or machine.memory_gb is None else USABLE * machine.memory_gb * GIB


def host_problems(plan: StepPlan, tier: Tier, table: Machines) -> Iterator[str]:
    """Yields why the data do not fit the memory or the disk of the tier's machines."""
    machine = table.machines.get(tier.machine_type)
    # In memory once as it was read and once as TensorFlow's tensors; a checkpoint's copy of the state comes on top.
    wanted = _PROCESS_BYTES + 2 * plan.data_bytes + plan.memory.state_bytes
    if tier.accelerators and machine and machine.memory_gb and wanted > USABLE * machine.memory_gb * GIB:
        yield (f"the data need {math.ceil(wanted / GIB)} GiB of the {machine.memory_gb:g} GB of {machine.name}: "
               "prepare them (python -m trainer.data.prepare), which reads large shards row by row")  # fmt: skip
    disk = int(tier.spec["workerPoolSpecs"][0].get("diskSpec", {}).get("bootDiskSizeGb", 100))
    if plan.data_bytes + _IMAGE_BYTES > disk * 1e9:
        yield f"the staged data need {plan.data_bytes / 1e9:.0f} GB of a disk of {disk} GB: raise bootDiskSizeGb"
