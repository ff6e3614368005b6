"""Estimates the hours and cost of a full job on each tier from runs at hand, with its assumptions.

Unknowns are intervals: on N times the devices a step takes between 1/N of its time (ideal) and all of it (no gain). Two
measured tiers of one machine with the same accelerator narrow that for larger ones: a step on N devices takes
a / N + b (docs/scaling.md). A tier that was measured keeps its own times.
"""

import math
from collections.abc import Callable, Iterable, Sequence
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


@dataclass(frozen=True)
class Extrapolation:
    """Holds the estimate for one tier: seconds from start to end, and of one step."""

    tier: str
    seconds: Interval
    step: Interval


@dataclass(frozen=True)
class Basis:
    """Holds the measured tiers that an estimate uses, the factor for the step of the first, and the reason in words."""

    tiers: tuple[str, ...]
    factor: Interval
    words: str


# Returns how many times as long a step takes on a tier as in a measured row, by the work in its graph; None: unknown.
Scale = Callable[[TierFacts, TierSummary], Interval | None]


def estimate(
    measured: Collection, tiers: Sequence[TierFacts], config: TrainConfig,
    by_graph: Scale = lambda tier, row: None,
) -> tuple[list[Extrapolation], list[str]]:  # fmt: skip
    """Returns an estimate for each tier that the runs tell something of, and the assumptions.

    Raises UserError if a run is of another training.
    """
    rows = {row.tier: row for row in summarize(measured)}
    runs = {tier.name: _first(tier.runs) for tier in measured.tiers if rows[tier.name].step_seconds}
    if not runs:
        raise UserError("the short run has no step times: let it take at least two reports")
    for run in runs.values():
        _same_training(run, config)
    estimates, used, assumptions = [], dict[str, None](), []
    for tier in tiers:
        basis = _basis(tier, [rows[name] for name in runs], config, by_graph)
        if basis:
            row = rows[basis.tiers[0]]
            used |= dict.fromkeys(basis.tiers)
            assumptions.append(f"{tier.name}: {basis.words}")
            if row.kind in _UNNAMED:
                assumptions.append(f"{tier.name}: the {row.kind} of the short run is taken for {tier.kind}")
            step = _measured(row).product(basis.factor)
            estimates.append(Extrapolation(tier.name, _seconds(runs[row.tier], row, step, config), step))
    sources = [_source(runs[name], rows[name]) for name in used]
    return estimates, [*sources, *_ALWAYS, *assumptions] if used else []


_ALWAYS = (
    "the time to get machines and to start a container is not included",
    "saving and evaluation take at least what they took in the short run, at most as many times that as the job is "
    "longer",
)


def _source(run: RunRecord, row: TierSummary) -> str:
    devices = f"{counted_devices(row.devices)} ({row.simulated or row.kind})"
    return f"the short run of {row.tier} is {run.folder}: {row.steps} steps on {devices}"


def _first(runs: Iterable[RunRecord]) -> RunRecord:
    """Returns the first timed run that is done, or the first timed run if none is."""
    return min((run for run in runs if run.timed), key=lambda run: run.state != "done")


def _same_training(run: RunRecord, config: TrainConfig) -> None:
    fixed = fixed_settings(config).items()
    differing = [key for key, value in fixed if key in run.config and run.config[key] != value]
    if differing:
        key = differing[0]
        raise UserError(
            f"{run.folder} is another training ({key}: {run.config[key]!r} there, {getattr(config, key)!r} here): "
            "give the flags of the full job, only steps or epochs may differ"
        )


_UNNAMED = ("CPU", "GPU")  # kinds of devices without a model name


def _is_of(tier: TierFacts, row: TierSummary) -> bool:
    """Returns whether the row was measured on real devices of the tier's kind, as far as the names tell."""
    if row.simulated:
        return False
    if not tier.accelerators:
        return row.kind in ("CPU", tier.machine_type)
    return row.kind == tier.accelerator_type or (row.kind, row.tier) == ("GPU", tier.name)


def _basis(tier: TierFacts, rows: Sequence[TierSummary], config: TrainConfig, by_graph: Scale) -> Basis | None:
    """Returns the basis of a tier's estimate; None if no row measures it.

    Several simulated devices measure nothing, because they share one machine.
    """
    alike = [row for row in rows if _is_of(tier, row)]
    itself = next((row for row in alike if (row.tier, row.devices) == (tier.name, tier.devices)), None)
    if itself:
        return Basis((itself.tier,), Interval(1, 1, 1), "its own step times, the quartiles as interval")
    real = [row for row in rows if not row.simulated]
    nearest = sorted(real, key=lambda row: (row not in alike, abs(row.devices - tier.devices)))
    return (
        _beyond(tier, alike, config)
        or next(filter(None, (_by_graph(tier, row, by_graph) for row in nearest)), None)
        or (_shared(tier, alike[0]) if alike else None)
    )


def _by_graph(tier: TierFacts, row: TierSummary, by_graph: Scale) -> Basis | None:
    """Returns the basis by the work in the step's graph, if the rates of both kinds of device are known."""
    factor = by_graph(tier, row)
    if factor is None:
        return None
    words = f"by the work in the graph, a step takes {figures(factor.low)} to {figures(factor.high)} x the time of"
    return Basis((row.tier,), factor, f"{words} one of {row.tier}")


def _beyond(tier: TierFacts, alike: Iterable[TierSummary], config: TrainConfig) -> Basis | None:
    """Returns the basis for a tier with more devices than two measured tiers of one machine, by `scaling.interval`.

    The quartiles of the larger tier's step times widen it.
    """
    rows = [row for row in alike if row.workers == tier.workers == 1]
    few, many = (choose(rows, key=lambda row: row.devices, default=None) for choose in (min, max))
    if not few or not many or not few.devices < many.devices < tier.devices:
        return None
    small, large = _point(few, config), _point(many, config)
    factor = interval(small, large, tier.devices, config.global_batch_size / tier.devices).times(1 / large.seconds)
    words = f"by a / N + b through {few.devices} and {many.devices} devices, {tier.devices} take "
    words += f"{figures(factor.low)} to {figures(factor.high)} x the time of {many.devices}"
    return Basis((many.tier, few.tier), factor, f"{words} (the runs of {few.tier} and {many.tier})")


def _point(row: TierSummary, config: TrainConfig) -> Measurement:
    rows = row.batch_per_replica or config.global_batch_size / row.devices
    return Measurement(row.devices, rows, _measured(row).middle)


def _shared(tier: TierFacts, row: TierSummary) -> Basis:
    """Returns the basis by the number of devices, from no gain to ideal."""
    ratio = tier.devices / row.devices
    low, high = sorted((1 / ratio, 1.0))
    words = [f"one device is taken to be as fast as one of the run of {row.tier}"]
    if ratio != 1:
        words.append(f"{tier.devices} devices take {figures(low)} to {figures(high)} x the time of {row.devices}")
    return Basis((row.tier,), Interval(low, math.sqrt(low * high), high), "; ".join(words))


def _steps(run: RunRecord, config: TrainConfig) -> int:
    """Returns the steps of the full job, whose epochs have as many steps as those of the short run."""
    if config.steps:
        return config.steps
    if not run.steps_per_epoch:
        raise UserError(f"{run.folder} does not say how many steps an epoch has: give --steps= instead of --epochs=")
    return (config.epochs or 1) * run.steps_per_epoch


def _measured(row: TierSummary) -> Interval:
    """Returns the measured seconds of a step, with their quartiles."""
    assert row.step_seconds is not None, "only measured rows come here"
    return Interval(row.step_seconds.low, row.step_seconds.median, row.step_seconds.high)


def _seconds(run: RunRecord, row: TierSummary, step: Interval, config: TrainConfig) -> Interval:
    """Returns start-up, all steps, and the rest of the short run (saving, evaluation), which may grow with steps."""
    steps, start = _steps(run, config), run.startup_seconds or 0.0
    longer = max(1.0, steps / (run.steps or steps))
    rest = max(0.0, (run.wall_seconds or 0.0) - start - (run.steps or 0) * _measured(row).middle)
    every = step.times(steps)
    return Interval(start + every.low + rest, start + every.middle + rest, start + every.high + rest * longer)
