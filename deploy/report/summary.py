"""Summarizes each tier: the values of all its runs, and why a value is missing."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from deploy.report.collection import Collection, TierRuns
from deploy.report.run_reader import Run
from deploy.report.timing import Spread, epoch_seconds, spread, timed, warm_up_steps
from deploy.spec.machine_table import accelerator_of
from deploy.spec.tier import check_tiers
from trainer.config.metric_names import OF_IMAGES
from trainer.reporting.breakdown import ALL_REDUCE, DISPATCH, INPUT, KINDS, MATRIX, MEMORY
from trainer.storage.run_layout import RESULT, RUN_INFO, STATS

LOSSES = ("val_loss", "loss", "critic_loss", "generator_loss", "discriminator_loss")  # the first that a run reports
ACCURACIES = ("val_accuracy", "accuracy")
UNKNOWN = "unknown"  # the kind of devices that no run names
UNKNOWN_MACHINE = f"{RUN_INFO} does not state where it ran"
NO_IMAGES = "the run generated no images"  # as of a table: its notes leave out measures of images
NOT_PROFILED = "the run was not profiled: use --profile_steps=100..110"
_MIXED = "its repeats differ"
_SIMULATED = "its devices are simulated, so its speed does not apply to real ones"


@dataclass(frozen=True)
class TierSummary:
    """Holds the values of one tier over all its repeats, in seconds, USD, GiB. `missing` has a reason for each None."""

    tier: str
    state: str  # done, or how the runs ended
    machine: str | None
    kind: str  # of its devices: efficiency and scaling compare only equal kinds
    workers: int
    devices: int
    simulated: str  # what is simulated; "" for real devices
    repeats: int
    batch_per_replica: int | None
    global_batch: int | None
    steps: int | None
    warmup_steps: int | None  # of each repeat, not in the medians
    step_seconds: Spread | None
    epoch_seconds: Spread | None
    images_per_second: Spread | None
    input_wait: float | None  # share of a step that was lost waiting for the batch
    profile_matrix: float | None  # shares of the profiled steps, as the next four
    profile_memory: float | None
    profile_all_reduce: float | None
    profile_input: float | None
    profile_dispatch: float | None
    startup_seconds: float | None
    total_seconds: float | None
    final_loss: float | None
    final_accuracy: float | None
    fid: float | None
    coverage: float | None
    peak_memory_gib: float | None
    peak_gpu_memory_gib: float | None
    loss_name: str | None
    accuracy_name: str | None
    images: int | None  # read in the whole run
    unit: str = "images"  # what these are called
    quality: str = ""  # what the measures of images of all its runs were computed with
    speed_up: float | None = None
    efficiency: float | None = None
    price_per_hour: float | None = None
    cost: float | None = None
    cost_per_million_images: float | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


QUALITY = tuple(each.name for each in fields(TierSummary) if each.name in OF_IMAGES)  # the measures of images


def summarize(
    collection: Collection, baseline: str = "", usd_by_tier: Mapping[str, float] | None = None
) -> list[TierSummary]:
    """Returns a summary of each tier, compared with `baseline`, by default the first tier.

    `usd_by_tier`: prices of one hour of all machines, instead of those in a comparison. Raises UserError for an
    unknown tier.
    """
    groups = collection.tiers
    names = [group.name for group in groups]
    given = dict(usd_by_tier or {})
    check_tiers([*([baseline] if baseline else []), *given], names)
    prices = {group.name: group.tier.price_per_hour for group in groups if group.tier} | given
    rows = [_summary(group, collection.local) for group in groups]
    rows = _comparable_quality(rows)
    reasons = [_no_cost(row, collection.local and row.tier not in given) for row in rows]
    rows = [_with_costs(row, prices.get(row.tier), not reason) for row, reason in zip(rows, reasons, strict=True)]
    base = rows[names.index(baseline or names[0])]
    return [
        _with_reasons(_with_speed_up(row, base), group.runs, base, reason)
        for row, group, reason in zip(rows, groups, reasons, strict=True)
    ]


def _summary(group: TierRuns, local: bool) -> TierSummary:
    """Summarizes the runs that are done or, if none is, the others."""
    done = [run for run in group.runs if run.state == "done"]
    runs = done or group.runs
    steps = spread(line.step_seconds for run in runs for line in timed(run))
    loss = next((name for name in LOSSES if done and all(name in run.final for run in done)), None)
    accuracy = next((name for name in ACCURACIES if any(name in run.final for run in done)), None)
    of_images: dict[str, Any] = {name: _median(run.final.get(name) for run in done) for name in QUALITY}
    return TierSummary(
        tier=group.name,
        state=runs[0].state if runs else "missing",
        machine=group.tier.machine if group.tier else None,
        kind=_kind(group, local),
        workers=_workers(group),
        devices=_devices(group),
        simulated=_simulated(group, local),
        repeats=len(done),
        batch_per_replica=_common(run.rows_per_replica for run in runs),
        global_batch=_common(run.global_batch_size for run in runs),
        steps=_common(run.steps for run in runs),
        warmup_steps=_largest(warm_up_steps(run) for run in runs) if steps else None,
        step_seconds=steps,
        epoch_seconds=spread(seconds for run in runs for seconds in epoch_seconds(run)),
        images_per_second=spread(line.images_per_second for run in runs for line in timed(run)),
        input_wait=_median(line.input_wait for run in runs for line in timed(run)),
        profile_matrix=_median(run.profile.get(MATRIX) for run in runs),
        profile_memory=_median(run.profile.get(MEMORY) for run in runs),
        profile_all_reduce=_median(run.profile.get(ALL_REDUCE) for run in runs),
        profile_input=_median(run.profile.get(INPUT) for run in runs),
        profile_dispatch=_median(run.profile.get(DISPATCH) for run in runs),
        startup_seconds=_median(run.startup_seconds for run in runs),
        total_seconds=_median(run.wall_seconds for run in done),
        final_loss=_median(run.final.get(loss) for run in done) if loss else None,
        final_accuracy=_median(run.final.get(accuracy) for run in done) if accuracy else None,
        **of_images,
        quality=_MIXED if len({run.quality for run in done}) > 1 else "".join({run.quality for run in done}),
        peak_memory_gib=_largest(run.peak_memory_gib for run in runs),
        peak_gpu_memory_gib=_largest(line.gpu_memory_gib for run in runs for line in (*run.reports, *run.epochs)),
        loss_name=loss,
        accuracy_name=accuracy,
        images=_common(_product(run.steps, run.examples_per_step) for run in runs),
        unit=_common(run.unit for run in runs) or "images",
    )


def in_units(text: str, rows: Sequence[TierSummary]) -> str:
    """Returns a title or sentence about images with the word for what the runs read, if that is another."""
    units = sorted({row.unit for row in rows if row.images_per_second} or {row.unit for row in rows})
    return text if "images" in units or not units else text.replace("images", units[0])


def _comparable_quality(rows: Sequence[TierSummary]) -> list[TierSummary]:
    """Returns the rows, those whose features, images or formulas are not the first one's without measures of images."""
    wanted = next((row.quality for row in rows if row.quality not in ("", _MIXED)), "")
    none: dict[str, Any] = dict.fromkeys(QUALITY)
    return [row if row.quality == wanted else replace(row, **none) for row in rows]


def _no_cost(row: TierSummary, on_this_machine: bool) -> str:
    """Returns why the tier's price does not apply to the measured seconds; "" if it does."""
    if row.simulated:
        return _SIMULATED
    if on_this_machine and row.kind == UNKNOWN:
        return UNKNOWN_MACHINE
    fix = f"use --price_per_hour={row.tier}=USD with the price of this machine"
    return f"it ran on this machine, not on the machines of that price: {fix}" if on_this_machine else ""


def _with_costs(row: TierSummary, price: float | None, applies: bool) -> TierSummary:
    """Adds the price in USD an hour and, if it applies to the measured seconds, the costs."""
    speed, usd = row.images_per_second.median if row.images_per_second else None, price if applies else None
    return replace(
        row,
        price_per_hour=price,
        cost=_product(usd, row.total_seconds, 1 / 3600),
        cost_per_million_images=_product(usd, 1 / 3600, 1e6 / speed if speed else None),
    )


def _with_speed_up(row: TierSummary, base: TierSummary) -> TierSummary:
    """Adds the speed-up over `base` and, if the devices are real and of one kind, the efficiency."""
    if _no_speed(row) or _no_speed(base) or row.images_per_second is None or base.images_per_second is None:
        return row
    speed_up = row.images_per_second.median / base.images_per_second.median
    comparable = row.kind == base.kind != UNKNOWN and not (row.simulated or base.simulated)
    return replace(row, speed_up=speed_up, efficiency=speed_up * base.devices / row.devices if comparable else None)


def _no_speed(row: TierSummary) -> bool:
    return row.state != "done" or row.images_per_second is None


def _with_reasons(row: TierSummary, runs: Sequence[Run], base: TierSummary, no_cost: str) -> TierSummary:
    """Adds the reason of each missing value."""
    not_done = runs[-1].ending if runs else "it was not run"
    if any(run.state == "done" for run in runs):
        not_done = ""
    no_stats = next((run.no_stats for run in runs if run.no_stats), "")
    not_timed = not_done or no_stats or "fewer than two reports were timed: lower report_every_steps"
    no_speed = not_done or f"{row.tier if _no_speed(row) else base.tier} has no finished run with images/s"
    no_price = f"the price is not known: use --price_per_hour={row.tier}=USD"
    no_result = not_done or f"{RESULT} does not contain it"
    no_total = f"{RESULT} was removed and made again: it does not count the time before"
    reasons = {
        "machine": "the job directory does not state the machine",
        **dict.fromkeys(("batch_per_replica", "global_batch"), not_done or f"{RUN_INFO} does not contain it"),
        "steps": not_done or "the repeats differ, or do not state it",
        **dict.fromkeys(("warmup_steps", "step_seconds", "images_per_second"), not_timed),
        "epoch_seconds": not_done or "no full epoch after the first, which is warm-up",
        "speed_up": no_speed,
        "efficiency": no_speed if row.speed_up is None else _no_efficiency(row, base),
        **dict.fromkeys(("startup_seconds", "final_loss", "peak_memory_gib"), no_result),
        "total_seconds": not_done or (no_total if any(run.uncounted for run in runs) else no_result),
        "price_per_hour": no_price,
        "cost": not_done or no_cost or "its price or its total time is missing",
        "cost_per_million_images": not_done or no_cost or (no_price if row.price_per_hour is None else not_timed),
        "final_accuracy": not_done or "the model reports no accuracy",
        **dict.fromkeys(QUALITY, not_done or _no_quality(runs)),
        "input_wait": not_timed if row.step_seconds is None else f"{STATS} does not contain it",
        **dict.fromkeys((f"profile_{kind}" for kind in KINDS), not_done or NOT_PROFILED),
        "peak_gpu_memory_gib": not_done or f"{STATS} contains no GPU memory",
    }
    return replace(row, missing={key: reason for key, reason in reasons.items() if getattr(row, key) is None})


def _no_quality(runs: Sequence[Run]) -> str:
    """Returns why a tier has no measures of its images."""
    if any(run.quality for run in runs):
        return "its features, images or formulas are others than those it would be compared with"
    if not any(run.sample for run in runs):
        return NO_IMAGES
    return "the run did not compute it: use --fid_every_steps"


def _no_efficiency(row: TierSummary, base: TierSummary) -> str:
    """Returns why the devices of two tiers cannot be compared."""
    if row.simulated:
        return _SIMULATED
    if base.simulated:
        return f"the devices of {base.tier} are simulated"
    if UNKNOWN in (row.kind, base.kind):
        return UNKNOWN_MACHINE
    return f"its devices are of another kind than those of {base.tier}"


def _simulated(group: TierRuns, local: bool) -> str:
    """Describes which machines or devices were not real; "" if all were."""
    tier, devices = group.tier, [device for run in group.runs for device in run.devices]
    on_cpu = devices and all(device.startswith("CPU") for device in devices)
    if on_cpu and (any(run.simulated for run in group.runs) or (tier and tier.accelerators)):
        return f"{tier.accelerator_type if tier else 'accelerators'} simulated on a CPU"
    if on_cpu and _devices(group) > _workers(group):
        return "logical devices of one CPU"
    return "all workers on one machine" if local and _workers(group) > 1 else ""


def _kind(group: TierRuns, local: bool) -> str:
    """Returns the accelerator or the machine; CPU or GPU if the run has no tier, or was local, and names no GPU."""
    named = next((run.gpus[0] for run in group.runs if run.gpus), "")
    if named:
        return accelerator_of(named)
    if group.tier is None or local:
        return next((run.devices[0].partition(":")[0] for run in group.runs if run.devices), "") or UNKNOWN
    return group.tier.kind


def _workers(group: TierRuns) -> int:
    return max((run.workers for run in group.runs), default=group.tier.workers if group.tier else 1)


def _devices(group: TierRuns) -> int:
    planned = group.tier.devices if group.tier else 1
    return max((run.replicas or len(run.devices) or planned for run in group.runs), default=planned)


def _common(values: Iterable[Any]) -> Any:
    """Returns the value if all are equal; else None."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _largest(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


def _product(*factors: Any) -> Any:
    """Returns the product; None if a factor is None."""
    return None if None in factors else math.prod(factors)
