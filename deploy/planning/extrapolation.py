"""Estimates the hours of a full job on each tier from runs at hand, with its assumptions.

A tier that was measured keeps its own times. Two measured tiers of one machine with the same accelerator tell of larger
ones (scaling.py). Else N times the devices take between 1/N of a step's time (ideal) and all of it (no gain).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deploy.planning.interval import Interval
from deploy.planning.scaling import Measurement, interval
from deploy.report.collection import Collection
from deploy.report.run_reader import RunRecord
from deploy.report.summary import summarize
from deploy.report.table import counted_devices, figures
from deploy.report.tier_summary import TierSummary
from deploy.tiers.tier import TierFacts
from trainer.base.errors import UserError
from trainer.base.settings.own_settings import fixed_settings
from trainer.base.settings.train_config import TrainConfig

START_DOUBT = Interval(0.5, 1.0, 2.0)  # of the start-up of a short run, which machines and disks change
_BATCH = ("global_batch_size", "micro_batches")  # which may differ if the rows of a pass are those of a tier


@dataclass(frozen=True)
class Extrapolation:
    """Holds the estimate for one tier: seconds from start to end, and of one step."""

    tier: str
    seconds: Interval
    step: Interval


@dataclass(frozen=True)
class _Measured:
    """Holds a measured tier: a run of it, seconds for the rows of the planned batch, and the rows of a pass."""

    row: TierSummary
    run: RunRecord
    step: Interval
    rows: float
    same_batch: bool

    @property
    def point(self) -> Measurement:
        return Measurement(self.row.devices, self.rows, self.step.middle)


@dataclass(frozen=True)
class _Basis:
    """Holds the measured tiers that an estimate uses, the step that follows from the first, and the reason in words."""

    used: tuple[_Measured, ...]
    step: Interval
    words: str


def estimate(
    measured: Collection, tiers: Sequence[TierFacts], config: TrainConfig
) -> tuple[list[Extrapolation], list[str]]:  # fmt: skip
    """Returns an estimate for each tier that the runs tell something of, and the assumptions.

    Raises UserError if a run is of another training.
    """
    rows = {row.tier: row for row in summarize(measured)}
    runs = {tier.name: _first(tier.runs) for tier in measured.tiers if rows[tier.name].step_seconds}
    if not runs:
        raise UserError("the short run has no step times: let it take at least two reports")
    asked = {_rows_of_pass(config.global_batch_size, tier.devices, config.passes(tier.devices)) for tier in tiers}
    known = [_read(rows[name], run, config, asked) for name, run in runs.items()]
    estimates, used, assumptions = [], dict[str, _Measured](), []
    for tier in tiers:
        basis = _basis(tier, known, config)
        if basis:
            first = basis.used[0]
            used |= {each.row.tier: each for each in basis.used}
            assumptions.append(f"{tier.name}: {basis.words}")
            if first.row.kind in _UNNAMED:
                assumptions.append(f"{tier.name}: the {first.row.kind} of the short run is taken for {tier.kind}")
            estimates.append(Extrapolation(tier.name, _seconds(first, basis.step, config), basis.step))
    sources = [_source(each) for each in used.values()]
    return estimates, [*sources, *_ALWAYS, *assumptions] if used else []


_ALWAYS = (
    "the time to get machines and to start a container is not included",
    "saving and evaluation take at least what they took in the short run, at most as many times that as the job is "
    "longer",
)


def _rows_of_pass(batch: float, devices: int, passes: float) -> float:
    return batch / devices / passes


def _read(row: TierSummary, run: RunRecord, config: TrainConfig, asked: set[float]) -> _Measured:
    """Returns what a run tells. Raises UserError if it is of another training.

    Its batch may be another if each pass has as many rows as on a tier that is asked for (weak scaling, passes).
    """
    batch = run.config.get("global_batch_size", config.global_batch_size)
    passes = (run.config.get("virtual_replicas") or 0) / row.devices or run.config.get("micro_batches") or 1
    rows = _rows_of_pass(batch, row.devices, passes)
    fixed = {name: value for name, value in fixed_settings(config).items() if name not in _BATCH or rows not in asked}
    differing = [key for key, value in fixed.items() if key in run.config and run.config[key] != value]
    if differing:
        key = differing[0]
        raise UserError(
            f"{run.folder} is another training ({key}: {run.config[key]!r} there, {getattr(config, key)!r} here): "
            "give the flags of the full job, only steps or epochs may differ, and the batch if a pass has the same rows"
        )
    assert row.step_seconds is not None, "only measured rows come here"
    step = Interval(row.step_seconds.low, row.step_seconds.median, row.step_seconds.high)
    same = (batch, passes) == (config.global_batch_size, config.passes(row.devices))
    return _Measured(row, run, step.times(config.global_batch_size / batch), rows, same)


def _source(measured: _Measured) -> str:
    row = measured.row
    devices = f"{counted_devices(row.devices)} ({row.simulated or row.kind})"
    return f"the short run of {row.tier} is {measured.run.folder}: {row.steps} steps on {devices}"


def _first(runs: Iterable[RunRecord]) -> RunRecord:
    """Returns the first timed run that is done, or the first timed run if none is."""
    return min((run for run in runs if run.timed), key=lambda run: run.state != "done")


_UNNAMED = ("CPU", "GPU")  # kinds of devices without a model name


def _is_of(tier: TierFacts, row: TierSummary) -> bool:
    """Returns whether the row was measured on real devices of the tier's kind, as far as the names tell.

    Several simulated devices measure nothing, because they share one machine.
    """
    if row.simulated:
        return False
    if not tier.accelerators:
        return row.kind in ("CPU", tier.machine_type)
    return row.kind == tier.accelerator_type or (row.kind, row.tier) == ("GPU", tier.name)


def _basis(tier: TierFacts, known: Sequence[_Measured], config: TrainConfig) -> _Basis | None:
    """Returns the basis of a tier's estimate; None if no row measures its kind of device."""
    alike = [each for each in known if _is_of(tier, each.row)]
    for each in alike:
        if each.same_batch and (each.row.tier, each.row.devices) == (tier.name, tier.devices):
            return _Basis((each,), each.step, "its own step times, the quartiles as interval")
    return _beyond(tier, alike, config) or (_shared(tier, alike[0]) if alike else None)


def _beyond(tier: TierFacts, alike: Iterable[_Measured], config: TrainConfig) -> _Basis | None:
    """Returns the basis for a tier with more devices than two measured tiers of one machine, by `scaling.interval`.

    The quartiles of the larger tier's step times widen it.
    """
    points = [each for each in alike if each.row.workers == tier.workers == 1]
    few, many = (choose(points, key=lambda each: each.row.devices, default=None) for choose in (min, max))
    if not few or not many or not few.row.devices < many.row.devices < tier.devices:
        return None
    rows = _rows_of_pass(config.global_batch_size, tier.devices, config.passes(tier.devices))
    factor = interval(few.point, many.point, tier.devices, rows).times(1 / many.step.middle)
    words = f"by a / N + b through {few.row.devices} and {many.row.devices} devices, {tier.devices} take "
    words += f"{figures(factor.low)} to {figures(factor.high)} x the time of {many.row.devices}"
    words += f" (the runs of {few.row.tier} and {many.row.tier})"
    if not few.rows == many.rows == rows:
        words += "; a pass has fewer rows there, for which no rule held"
    return _Basis((many, few), many.step.product(factor), words)


def _shared(tier: TierFacts, measured: _Measured) -> _Basis:
    """Returns the basis by the number of devices, from no gain to ideal."""
    row = measured.row
    ratio = tier.devices / row.devices
    low, high = sorted((1 / ratio, 1.0))
    words = [f"one device is taken to be as fast as one of the run of {row.tier}"]
    if ratio != 1:
        words.append(f"{tier.devices} devices take {figures(low)} to {figures(high)} x the time of {row.devices}")
    factor = Interval(low, math.sqrt(low * high), high)
    return _Basis((measured,), measured.step.product(factor), "; ".join(words))


def _steps(measured: _Measured, config: TrainConfig) -> int:
    """Returns the steps of the full job, whose epochs have as many steps as those of a short run of the same batch."""
    if config.steps:
        return config.steps
    run = measured.run
    if not run.steps_per_epoch or not measured.same_batch:
        raise UserError(f"{run.folder} does not say how many steps an epoch has: give --steps= instead of --epochs=")
    return (config.epochs or 1) * run.steps_per_epoch


def _seconds(measured: _Measured, step: Interval, config: TrainConfig) -> Interval:
    """Returns start-up, all steps, and the rest of the short run (saving, evaluation), which may grow with steps."""
    run, row = measured.run, measured.row
    assert row.step_seconds is not None, "only measured rows come here"
    steps, start = _steps(measured, config), run.startup_seconds or 0.0
    rest = max(0.0, (run.wall_seconds or 0.0) - start - (run.steps or 0) * row.step_seconds.median)
    longer = max(1.0, steps / (run.steps or steps))
    return START_DOUBT.times(start).plus(step.times(steps)).plus(Interval(rest, rest, rest * longer))
