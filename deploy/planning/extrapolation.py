"""Estimates the hours of a full job on each tier from runs at hand, with its assumptions.

A tier that was measured keeps its own times. Two measured tiers of one machine with the same accelerator tell of larger
ones. Else N times the devices take between 1/N of a step's time (ideal) and all of it (no gain).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.planning.step_time import Interval
from deploy.report.collection import Collection
from deploy.report.formatting import counted_devices, figures
from deploy.report.measures import TierSummary, summarize
from deploy.report.run_reader import RunRecord
from deploy.tiers.tier import TierFacts
from trainer.base.errors import UserError
from trainer.base.settings.own_settings import fixed_settings
from trainer.base.settings.train_config import TrainConfig

COUNTED = 0.25  # of b, if the rows of both measured times are the same
SLOWER_BY_ROWS = 0.08  # a step takes ratio ** this as long where rows shrink by `ratio`, which the times did not show
ROWS_STAY = Interval(0.877, 1.0, 1.34)  # published over predicted
ROWS_SHRINK, NO_GAIN = 0.9, 1.05  # the least of published over predicted; the most of published over `many`


@dataclass(frozen=True)
class Measurement:
    """Holds a step on `devices` GPUs of one machine, with `rows` rows in a micro-batch, as seconds of a fixed batch."""

    devices: int
    rows: float
    seconds: float


def step_seconds(few: Measurement, many: Measurement, devices: int, rows: float) -> float:
    """Returns the seconds on `devices` GPUs with `rows` rows in each micro-batch, from `few` and more GPUs."""
    stays = (many.devices * many.seconds - few.devices * few.seconds) / (many.devices - few.devices)
    stays = min(max(stays, 0.0), many.seconds)
    if few.rows == many.rows:
        stays *= COUNTED
    shrunk = 1.0 if few.rows > many.rows else max(1.0, many.rows / rows) ** SLOWER_BY_ROWS
    return ((many.seconds - stays) * many.devices / devices + stays) * shrunk


def interval(few: Measurement, many: Measurement, devices: int, rows: float) -> Interval:
    """Returns the prediction with its interval."""
    seconds = step_seconds(few, many, devices, rows)
    if few.rows == many.rows == rows:
        return ROWS_STAY.times(seconds)
    return Interval(ROWS_SHRINK * seconds, seconds, max(NO_GAIN * many.seconds, seconds))


START_DOUBT = Interval(0.5, 1.0, 2.0)  # of the start-up of a short run, which machines and disks change
_BATCH = ("global_batch_size", "micro_batches")  # which may differ if the rows of a micro-batch are those of a tier


@dataclass(frozen=True)
class Extrapolation:
    """Holds the estimate for one tier: seconds from start to end, and of one step; `measured`: whose runs tell it."""

    tier: str
    measured: str
    seconds: Interval
    step: Interval


@dataclass(frozen=True)
class _Measured:
    """Holds a measured tier: a run of it, seconds for the rows of the planned batch, and the rows of a micro-batch."""

    row: TierSummary
    run: RunRecord
    step: Interval
    rows: float
    same_batch: bool


def estimate(
    measured: Collection, tiers: Sequence[TierFacts], config: TrainConfig
) -> tuple[list[Extrapolation], list[str]]:  # fmt: skip
    """Returns an estimate for each tier that the runs tell something of, and the assumptions.

    Raises UserError if a run is of another training.
    """
    planned_rows = {_micro_batch_rows(config, tier) for tier in tiers}
    runs = [_read(row, config, planned_rows) for row in summarize(measured) if row.step_seconds]
    if not runs:
        raise UserError("the short run has no step times: let it take at least two reports")
    estimates, sources, assumptions = [], dict[str, None](), []
    for tier in tiers:
        # Those on real devices of the tier's kind, as far as the names tell: simulated ones share one machine.
        alike = []
        for run in runs:
            kind, name = run.row.kind, run.row.tier
            on_cpu = kind in ("CPU", tier.machine_type)
            on_gpu = kind == tier.accelerator_type or (kind, name) == ("GPU", tier.name)
            if not run.row.simulated and (on_gpu if tier.accelerators else on_cpu):
                alike.append(run)
        if not alike:
            continue
        used, step, words = _step_on(tier, alike, config)
        for each in used:
            on = f"{counted_devices(each.row.devices)} ({each.row.simulated or each.row.kind})"
            sources[f"the short run of {each.row.tier} is {each.run.folder}: {each.row.steps} steps on {on}"] = None
        assumptions.append(f"{tier.name}: {words}")
        if used[0].row.kind in ("CPU", "GPU"):  # devices without a model name
            assumptions.append(f"{tier.name}: the {used[0].row.kind} of the short run is taken for {tier.kind}")
        # Start-up, all steps, and the rest of the short run (saving, evaluation), which may grow with steps. Epochs of
        # the full job have as many steps as those of a short run of the same batch.
        short, row = used[0].run, used[0].row
        steps = config.steps or (config.epochs or 1) * (short.steps_per_epoch or 0) * used[0].same_batch
        if not steps:
            raise UserError(
                f"{short.folder} does not say how many steps an epoch has: give --steps= instead of --epochs="
            )
        start = short.startup_seconds or 0.0
        rest = max(0.0, (short.wall_seconds or 0.0) - start - (short.steps or 0) * row.step_seconds.median)
        longer = max(1.0, steps / (short.steps or steps))
        total = START_DOUBT.times(start).plus(step.times(steps)).plus(Interval(rest, rest, rest * longer))
        estimates.append(Extrapolation(tier.name, " and ".join(run.row.tier for run in used), total, step))
    return estimates, [*sources, *_ALWAYS, *assumptions] if estimates else []


_ALWAYS = (
    "the time to get machines and to start a container is not included",
    "saving and evaluation take at least what they took in the short run, at most as many times that as the job is "
    "longer",
)


def _micro_batch_rows(config: TrainConfig, tier: TierFacts) -> float:
    """Returns the rows of a micro-batch of the planned run on each device of a tier."""
    return config.global_batch_size / tier.devices / config.micro_batches_on(tier.devices)


def _read(row: TierSummary, config: TrainConfig, planned_rows: set[float]) -> _Measured:
    """Returns what the first timed run of a tier tells, of those that are done if any is.

    Its batch may be another than the planned one if a micro-batch has as many rows as on a tier that is asked for, as
    in weak scaling. Raises UserError if it is of another training.
    """
    run = min((run for run in row.group.runs if run.timed), key=lambda run: run.state != "done")
    batch = run.config.get("global_batch_size", config.global_batch_size)
    micro_batches = (run.config.get("virtual_replicas") or 0) / row.devices or run.config.get("micro_batches") or 1
    rows = batch / row.devices / micro_batches
    free = _BATCH if rows in planned_rows else ()
    fixed = {name: value for name, value in fixed_settings(config).items() if name not in free}
    differing = [key for key, value in fixed.items() if key in run.config and run.config[key] != value]
    if differing:
        key = differing[0]
        raise UserError(
            f"{run.folder} is another training ({key}: {run.config[key]!r} there, {getattr(config, key)!r} here): "
            "give the flags of the full job, only steps or epochs may differ, and the batch if a micro-batch has the "
            "same rows"
        )
    step = Interval(row.step_seconds.low, row.step_seconds.median, row.step_seconds.high)
    same = (batch, micro_batches) == (config.global_batch_size, config.micro_batches_on(row.devices))
    return _Measured(row, run, step.times(config.global_batch_size / batch), rows, same)


def _step_on(
    tier: TierFacts, alike: Sequence[_Measured], config: TrainConfig
) -> tuple[tuple[_Measured, ...], Interval, str]:
    """Returns the runs that tell a tier's step, of those on its kind of device, the step, and how it follows."""
    for run in alike:
        if run.same_batch and (run.row.tier, run.row.devices) == (tier.name, tier.devices):
            return (run,), run.step, "its own step times, the quartiles as interval"
    points = sorted((run for run in alike if run.row.workers == tier.workers == 1), key=lambda run: run.row.devices)
    if points and points[0].row.devices < points[-1].row.devices < tier.devices:
        # More devices than two measured tiers of one machine; the quartiles of the larger one's step times widen it.
        few, many = points[0], points[-1]
        rows = _micro_batch_rows(config, tier)
        less, more = (Measurement(run.row.devices, run.rows, run.step.middle) for run in (few, many))
        factor = interval(less, more, tier.devices, rows).times(1 / many.step.middle)
        words = (
            f"by a / N + b through {few.row.devices} and {many.row.devices} devices, {tier.devices} take "
            f"{figures(factor.low)} to {figures(factor.high)} x the time of {many.row.devices} "
            f"(the runs of {few.row.tier} and {many.row.tier})"
        )
        fewer = "" if few.rows == many.rows == rows else "; a micro-batch has fewer rows there, for which no rule held"
        return (many, few), many.step.product(factor), f"{words}{fewer}"
    # By the number of devices alone, from no gain to ideal.
    row = alike[0].row
    ratio = row.devices / tier.devices
    factor = Interval(min(ratio, 1.0), math.sqrt(ratio), max(ratio, 1.0))
    words = f"one device is taken to be as fast as one of the run of {row.tier}"
    if ratio != 1:
        times = f"{figures(factor.low)} to {figures(factor.high)}"
        words += f"; {tier.devices} devices take {times} x the time of {row.devices}"
    return (alike[0],), alike[0].step.product(factor), words
