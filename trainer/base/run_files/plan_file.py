"""Defines, reads and writes plan.json: the memory and the work of a run's step.

Imports no TensorFlow.

`python -m trainer.plan` writes it and `deploy plan` reads it. Whatever changes a number in it
changes `plan_key` too, so that a kept plan is never that of another run.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import trainer
from trainer.base.errors import UserError
from trainer.base.run_files.job_files import read_json
from trainer.base.settings.own_settings import functions_taking, is_dotted, own_sources
from trainer.base.settings.step_counts import Schedule
from trainer.base.settings.train_config import MAY_CHANGE, TrainConfig
from trainer.base.storage import write_whole
from trainer.base.storage.staging import cache_home

PLAN_FORMAT = 12  # version of plan.json's format
# Settings of the trainer that a plan does not depend on: those that a resumed run may change, and
# others that change neither the memory nor the work of a row. A setting that a model's or the
# user's function takes always counts: with a dropout of 0, for one, there are no layers of it.
_NO_EFFECT = MAY_CHANGE | {
    "global_batch_size",
    "seed",
    "learning_rate",
    "evaluation_batch_size",
    "warmup_steps",
    "virtual_replicas",
}


class LinearInRows(NamedTuple):
    """Describes a quantity, as bytes or FLOPs, that is `fixed + per_row x rows`."""

    fixed: float
    per_row: float

    def at(self, rows: float) -> float:
        """Returns the value at a number of rows."""
        return self.fixed + self.per_row * rows


class CpuSteps(NamedTuple):
    """Holds the seconds of a step by its rows, measured with `cores` virtual CPUs."""

    seconds: LinearInRows
    cores: int


# suffix of the type of batch norm gradients that are slow on GPUs
FEW_CHANNELS = " of few channels"


class StepWork(NamedTuple):
    """Holds `times` equal operations of a step, with the FLOPs and bytes of each."""

    type: str
    times: int
    flops: LinearInRows
    moved_bytes: LinearInRows


@dataclass(frozen=True)
class Work:
    """Holds the operations of a replica's step, and the number and bytes of its all-reduces."""

    operations: Sequence[StepWork]
    all_reduces: int = 0
    reduced_bytes: int = 0

    @property
    def count(self) -> int:
        """Returns the number of operations that start a kernel."""
        return sum(work.times for work in self.operations)

    @property
    def convolutions(self) -> int:
        """Returns the number of convolutions among them, gradients included."""
        return sum(work.times for work in self.operations if "Conv" in work.type)

    def flops(self, rows: float) -> float:
        """Returns the FLOPs at a number of rows."""
        return sum(work.times * work.flops.at(rows) for work in self.operations)


@dataclass(frozen=True)
class Memory:
    """Holds linear functions of a micro-batch's rows by kind of device; their maximum is the peak
    memory in bytes.

    worst_order: factor by which the peak may grow if independent operations run in another order,
        or by which the measured peak at the fewest rows was above the lines.
    """

    # weights, optimizer, averages and activations on a GPU, in float32
    device: Sequence[LinearInRows]
    device_16_bit: Sequence[LinearInRows]  # the same with a 16-bit precision
    cpu: Sequence[LinearInRows]  # on a CPU, kernels' temporaries included
    state_bytes: int
    measured_rows: Sequence[int]
    worst_order: float

    def lines(self, config: TrainConfig, *, gpu: bool) -> Sequence[LinearInRows]:
        """Returns the memory lines for this device kind and precision."""
        mixed = config.precision.startswith("mixed")
        return (self.device_16_bit if mixed else self.device) if gpu else self.cpu


@dataclass(frozen=True)
class StepPlan:
    """Holds plan.json: a step's memory and work by the rows of a replica, on any machine."""

    model: str
    data: str
    key: str
    versions: dict[str, str]
    examples: int
    batches_per_step: int
    data_bytes: int  # of the examples in the host's memory
    memory: Memory
    trained_bytes: int  # of the weights that have gradients
    work: Work  # of a step on one replica
    # of a step on each of two replicas; None if it could not be traced on two
    work_of_two: Work | None
    # whether a step sums over several replicas before its update, which XLA cannot compile
    sums_within: bool
    # whether a step has loops that `work` lacks, as an LSTM has: GPUs have other kernels for them
    own_loops: bool
    cpu: CpuSteps  # of plain steps on one replica, where the plan was made

    def total_steps(self, config: TrainConfig) -> int:
        """Returns the number of steps of a run with these settings."""
        schedule = Schedule(
            self.examples, config.global_batch_size, self.batches_per_step, config.seed
        )
        return schedule.total_steps(config.steps, config.epochs)


def peak_of(lines: Sequence[LinearInRows], rows: float) -> float:
    """Returns the peak memory in bytes at a number of rows."""
    return max(line.at(rows) for line in lines)


def largest_rows(lines: Sequence[LinearInRows], limit: float) -> int:
    """Returns the largest number of rows whose peak fits into `limit` bytes, or 0."""
    if peak_of(lines, 1) > limit:
        return 0
    return int(
        min(
            ((limit - line.fixed) / line.per_row for line in lines if line.per_row > 0),
            default=10**9,
        )
    )


def write_plan(path: Path, plan: StepPlan) -> None:
    """Writes plan.json atomically."""
    write_whole(path, json.dumps({"format": PLAN_FORMAT, **asdict(plan)}) + "\n")


def read_plan(path: Path) -> StepPlan:
    """Reads plan.json. Raises UserError if it is missing, damaged or of another version."""
    content, problem = read_json(path)
    again = "make it again (python -m trainer.plan)"
    if problem:
        raise UserError(f"{problem}: {again}")
    if content.pop("format", None) != PLAN_FORMAT:
        raise UserError(f"{path} is no plan of this version: {again}")
    try:
        memory = content["memory"]
        for device in ("device", "device_16_bit", "cpu"):
            memory[device] = [LinearInRows(*map(float, pair)) for pair in memory[device]]
        content["memory"] = Memory(**memory)
        for name in ("work", "work_of_two"):
            if work := content[name]:
                operations = []
                for kind, times, flops, moved in work["operations"]:
                    rates = LinearInRows(*flops), LinearInRows(*moved)
                    operations.append(StepWork(kind, times, *rates))
                content[name] = Work(**{**work, "operations": operations})
        seconds, cores = content["cpu"]
        content["cpu"] = CpuSteps(LinearInRows(*seconds), cores)
        return StepPlan(**content)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error!r}): {again}") from None


def kept_plan(config: TrainConfig) -> Path:
    """Returns where the plan of these settings is, or would be, in the user's cache."""
    return cache_home(config.cache_dir) / "plans" / f"{plan_key(config)}.json"


def plan_key(config: TrainConfig, installed: Mapping[str, str] | None = None) -> str:
    """Returns a digest of what a plan depends on: settings, the user's own sources, versions.

    installed: the versions, by default this machine's. Only the last name in the path of data
        counts, so that a plan made with a local folder is also the plan for its copy in a bucket.
    """
    no_effect = {field.name for field in fields(config) if not functions_taking(field)} & _NO_EFFECT
    settings = {name: value for name, value in asdict(config).items() if name not in no_effect}
    settings["data"] = (
        config.data if is_dotted(config.data) else re.split("[/:]", config.data.rstrip("/"))[-1]
    )
    if config.precision.startswith("mixed"):  # its steps are measured in float32
        settings["precision"] = "float32"
    versions_used = versions() if installed is None else installed
    parts = [json.dumps([PLAN_FORMAT, settings, versions_used], sort_keys=True).encode()]
    for name in (config.model, config.data):
        parts += [file.read_bytes() for _, file in own_sources(name)]
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(digests).hexdigest()[:20]


def versions() -> dict[str, str]:
    """Returns the versions of this package, TensorFlow, Keras and NumPy, if installed."""
    installed = {"trainer": trainer.__version__}
    for name in ("tensorflow", "keras", "numpy"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
