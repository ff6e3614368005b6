"""Estimates the hours of a full job on each tier from short runs, and lists the assumptions.

A tier that was measured keeps its own step times. From two measured tiers of one machine each, with
the same accelerator, tiers with more devices are predicted: a step on N devices takes a / N + b.
Otherwise a step on N times the devices takes between 1/N of the time (ideal) and the same time (no
gain).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deploy.planning.step_time import Interval, ideal_to_no_gain
from deploy.report.collection import Collection
from deploy.report.formatting import figures
from deploy.report.measures import TierSummary, summarize
from deploy.report.run_reader import RunRecord
from deploy.tiers.tier import TierFacts
from trainer.base.errors import UserError
from trainer.base.settings.own_settings import changed_settings
from trainer.base.settings.train_config import TrainConfig

# A step on N devices takes a / N + b. These numbers come from published step times.
# the share of b that is counted if both measurements have the same rows in a micro-batch
COUNTED = 0.25
# with 1/r of the rows a step takes r ** this as long, unless the measured rows shrink as well
SLOWER_BY_ROWS = 0.08
ROWS_STAY = Interval(0.877, 1.0, 1.34)  # published over predicted times, if the rows stay the same
# otherwise: the least of published over predicted, the most of published over `many`
ROWS_SHRINK = 0.9
NO_GAIN = 1.05


@dataclass(frozen=True)
class Measurement:
    """Holds the time of a step with a fixed global batch on `devices` GPUs of one machine.

    `rows`: the rows of each micro-batch.
    """

    devices: int
    rows: float
    seconds: float


def seconds_on(few: Measurement, many: Measurement, devices: int, rows: float) -> float:
    """Returns the predicted seconds of a step on `devices` GPUs with `rows` rows in each
    micro-batch.

    The prediction is a / N + b through the measurements on `few` and on `many` GPUs.
    """
    # b: what more devices do not shorten
    added_device_seconds = many.devices * many.seconds - few.devices * few.seconds
    constant = added_device_seconds / (many.devices - few.devices)
    constant = min(max(constant, 0.0), many.seconds)
    if few.rows == many.rows:
        constant *= COUNTED
    shared = (many.seconds - constant) * many.devices / devices  # a / N
    # With fewer rows than were measured, each takes longer. Where more GPUs had fewer rows, the
    # measurements show that themselves.
    slower = 1.0
    if few.rows <= many.rows:
        slower = max(1.0, many.rows / rows) ** SLOWER_BY_ROWS
    return (shared + constant) * slower


def interval(few: Measurement, many: Measurement, devices: int, rows: float) -> Interval:
    """Returns the prediction of `seconds_on` with the interval in which published times were."""
    seconds = seconds_on(few, many, devices, rows)
    if few.rows == many.rows == rows:
        return ROWS_STAY.times(seconds)
    return Interval(ROWS_SHRINK * seconds, seconds, max(NO_GAIN * many.seconds, seconds))


# factors of a short run's start-up, which differs between machines and disks
START_DOUBT = Interval(0.5, 1.0, 2.0)


class Extrapolation(NamedTuple):
    """Holds the estimate for one tier. `seconds`: from start to end; `step`: seconds of one step.

    `measured`: the names of the tiers whose runs the estimate is made from.
    """

    tier: str
    measured: str
    seconds: Interval
    step: Interval


@dataclass(frozen=True)
class _Measured(Measurement):
    """Holds a measured tier and the run that stands for it.

    `step`: its seconds a step, scaled to the planned global batch; `same_batch`: whether its global
        batch and micro-batches are the planned ones.
    """

    row: TierSummary
    run: RunRecord
    step: Interval
    same_batch: bool


def extrapolate(
    measured: Collection, tiers: Sequence[TierFacts], config: TrainConfig
) -> tuple[list[Extrapolation], list[str]]:
    """Returns an estimate for each tier on whose kind of device there is a run, and lines that
    state the assumptions.

    Raises UserError if no run has step times, or a run trained with other settings than `config`.
    """
    planned_rows = {_micro_batch_rows(config, tier) for tier in tiers}
    runs = [_read(row, config, planned_rows) for row in summarize(measured) if row.step_seconds]
    if not runs:
        raise UserError("the short run has no step times: let it take at least two reports")
    estimates = []
    sources = dict[str, None]()
    assumptions = []
    for tier in tiers:
        # The runs on real devices of the tier's kind, as far as the names tell; simulated devices
        # share one machine, so that their times say nothing.
        alike = []
        for run in runs:
            kind = run.row.kind
            name = run.row.tier
            on_cpu = kind in ("CPU", tier.machine_type)
            on_gpu = kind == tier.accelerator_type or (kind, name) == ("GPU", tier.name)
            if not run.row.simulated and (on_gpu if tier.accelerators else on_cpu):
                alike.append(run)
        if not alike:
            continue
        basis, step, explanation = _step_on(tier, alike, config)
        for measurement in basis:
            row = measurement.row
            length = f"{row.steps} steps on {row.devices} x {row.kind}"
            sources[f"the short run of {row.tier} is {measurement.run.folder}: {length}"] = None
        assumptions.append(f"{tier.name}: {explanation}")
        if basis[0].row.kind in ("CPU", "GPU"):  # devices without a model name
            assumptions.append(
                f"{tier.name}: the {basis[0].row.kind} of the short run is taken for {tier.kind}"
            )
        # The job takes its start-up, all its steps, and what else the short run took (saving,
        # evaluation), which may grow with the steps. An epoch has as many steps as in the short run
        # only if that had the same batch.
        short = basis[0].run
        row = basis[0].row
        steps = (
            config.steps
            or (config.epochs or 1) * (short.steps_per_epoch or 0) * basis[0].same_batch
        )
        if not steps:
            raise UserError(
                f"{short.folder} does not say how many steps an epoch has: give --steps= instead of"
                " --epochs="
            )
        start = short.startup_seconds or 0.0
        trained = (short.steps or 0) * row.step_seconds.median
        other = max(0.0, (short.wall_seconds or 0.0) - start - trained)
        longer = max(1.0, steps / (short.steps or steps))
        total = START_DOUBT.times(start).plus(step.times(steps))
        total = total.plus(Interval(other, other, other * longer))
        names = " and ".join(run.row.tier for run in basis)
        estimates.append(Extrapolation(tier.name, names, total, step))
    always = (
        "the time to get machines and to start a container is not included",
        (
            "saving and evaluation take at least what they took in the short run, at most as many"
            " times that as the job is longer"
        ),
    )
    return estimates, [*sources, *always, *assumptions] if estimates else []


def _micro_batch_rows(config: TrainConfig, tier: TierFacts) -> float:
    """Returns how many rows a micro-batch of the planned run has on each device of a tier."""
    return config.global_batch_size / tier.devices / config.micro_batches_on(tier.devices)


def _read(row: TierSummary, config: TrainConfig, planned_rows: set[float]) -> _Measured:
    """Returns what the first timed run of a tier measured, a run that is done if there is one.

    Its global batch may differ from the planned one if its micro-batches have as many rows as on
    one of the planned tiers (`planned_rows`), as in weak scaling. Raises UserError if another
    setting differs.
    """
    run = min((run for run in row.group.runs if run.timed), key=lambda run: run.state != "done")
    batch = run.config.get("global_batch_size", config.global_batch_size)
    # How many rows each of its micro-batches had.
    micro_batches = (
        (run.config.get("virtual_replicas") or 0) / row.devices
        or run.config.get("micro_batches")
        or 1
    )
    rows = batch / row.devices / micro_batches
    may_differ = ("global_batch_size", "micro_batches") if rows in planned_rows else ()
    for name, (of_run, planned) in changed_settings(run.config, config).items():
        if name not in may_differ:
            raise UserError(
                f"{run.folder} was trained with other settings ({name}: {of_run!r} there,"
                f" {planned!r} here): give the flags of the full job, only steps or epochs may"
                " differ, and the batch if a micro-batch has the same rows"
            )
    measured = Interval(row.step_seconds.low, row.step_seconds.median, row.step_seconds.high)
    step = measured.times(config.global_batch_size / batch)
    planned_batches = (config.global_batch_size, config.micro_batches_on(row.devices))
    same_batch = (batch, micro_batches) == planned_batches
    return _Measured(row.devices, rows, step.middle, row, run, step, same_batch)


def _step_on(
    tier: TierFacts, alike: Sequence[_Measured], config: TrainConfig
) -> tuple[tuple[_Measured, ...], Interval, str]:
    """Returns the runs that a tier's step time is predicted from, the prediction in seconds, and
    its explanation.

    `alike`: the measured tiers on the same kind of device.
    """
    for run in alike:
        if run.same_batch and (run.row.tier, run.devices) == (tier.name, tier.devices):
            return (run,), run.step, "its own step times, the quartiles as interval"
    points = sorted(
        (run for run in alike if run.row.workers == tier.workers == 1), key=lambda run: run.devices
    )
    if points and points[0].devices < points[-1].devices < tier.devices:
        # The tier has more devices than two measured tiers of one machine each. The quartiles of
        # the step times of the larger of them widen the interval.
        few = points[0]
        many = points[-1]
        rows = _micro_batch_rows(config, tier)
        factor = interval(few, many, tier.devices, rows).times(1 / many.seconds)
        explanation = (
            f"by a / N + b through {few.devices} and {many.devices} devices, {tier.devices} take "
            f"{figures(factor.low)} to {figures(factor.high)} x the time of {many.devices} "
            f"(the runs of {few.row.tier} and {many.row.tier})"
        )
        if not few.rows == many.rows == rows:
            explanation += "; a micro-batch has fewer rows there, for which no rule held"
        return (many, few), many.step.product(factor), explanation
    # Only the number of devices is known: the interval is from no gain to an ideal one.
    row = alike[0].row
    ratio = row.devices / tier.devices
    factor = ideal_to_no_gain(ratio)
    explanation = f"one device is taken to be as fast as one of the run of {row.tier}"
    if ratio != 1:
        times = f"{figures(factor.low)} to {figures(factor.high)}"
        explanation += f"; {tier.devices} devices take {times} x the time of {row.devices}"
    return (alike[0],), alike[0].step.product(factor), explanation
