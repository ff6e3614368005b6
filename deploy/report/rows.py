"""The measurement of a tier: what its runs give together as one typed row, and why a value is missing."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deploy.report.collection import Collection, TierRuns
from deploy.report.run_reader import Run
from deploy.report.timing import Spread, epoch_seconds, spread, timed, warm_up_steps
from deploy.spec.machine_table import accelerator_of
from deploy.spec.tier import check_tiers

LOSSES = ("val_loss", "loss", "critic_loss", "generator_loss", "discriminator_loss")  # the first that a run has
ACCURACIES = ("val_accuracy", "accuracy")
UNKNOWN = "unknown"  # the kind of devices of which no run tells


@dataclass(frozen=True)
class Row:
    """One tier, all its repeats together. Seconds, USD, GiB. What is None has its reason in `missing`."""

    tier: str
    state: str  # done, or how the runs ended
    machine: str | None
    kind: str  # of its devices: only equal kinds can be efficient or scale against each other
    workers: int
    devices: int
    simulated: str  # what about the devices is simulated, or nothing
    repeats: int
    batch_per_replica: int | None
    global_batch: int | None
    steps: int | None
    warmup_steps: int | None  # left out of the medians, in each repeat
    step_seconds: Spread | None
    epoch_seconds: Spread | None
    images_per_second: Spread | None
    startup_seconds: float | None
    total_seconds: float | None
    final_loss: float | None
    final_accuracy: float | None
    fid: float | None
    peak_memory_gib: float | None
    peak_gpu_memory_gib: float | None
    loss_name: str | None
    accuracy_name: str | None
    images: int | None  # read in the whole run
    speed_up: float | None = None
    efficiency: float | None = None
    price_per_hour: float | None = None
    cost: float | None = None
    cost_per_million_images: float | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


def measure(collection: Collection, baseline: str = "", usd_by_tier: Mapping[str, float] | None = None) -> list[Row]:
    """A row a tier. Speed-up and efficiency are against `baseline`, by default the first; UserError for one unknown.

    Prices of `usd_by_tier`, an hour of all machines, win over those of a comparison.
    """
    groups = collection.tiers
    names = [group.name for group in groups]
    check_tiers([*([baseline] if baseline else []), *(usd_by_tier or {})], names)
    given = dict(usd_by_tier or {})
    known = {group.name: group.tier.price_per_hour for group in groups if group.tier} | given
    rows = [_measured(group, collection.at_desk) for group in groups]
    uncosted = [_uncosted(row, collection.at_desk and row.tier not in given) for row in rows]
    rows = [_priced(row, known.get(row.tier), not why) for row, why in zip(rows, uncosted, strict=True)]
    first = rows[names.index(baseline or names[0])]
    return [
        _explained(_against(row, first), group.runs, first, why)
        for row, group, why in zip(rows, groups, uncosted, strict=True)
    ]


def _measured(group: TierRuns, at_desk: bool) -> Row:
    """What the runs that are done say or, where none is, what is left of the others."""
    done = [run for run in group.runs if run.state == "done"]
    runs = done or group.runs
    steps = spread(window.step_seconds for run in runs for window in timed(run))
    loss = next((name for name in LOSSES if done and all(name in run.final for run in done)), None)
    accuracy = next((name for name in ACCURACIES if any(name in run.final for run in done)), None)
    return Row(
        tier=group.name,
        state=runs[0].state if runs else "missing",
        machine=group.tier.machine if group.tier else None,
        kind=_kind(group, at_desk),
        workers=_workers(group),
        devices=_devices(group),
        simulated=_simulated(group, at_desk),
        repeats=len(done),
        batch_per_replica=_common(run.rows_per_replica for run in runs),
        global_batch=_common(run.global_batch_size for run in runs),
        steps=_common(run.steps for run in runs),
        warmup_steps=_most(warm_up_steps(run) for run in runs) if steps else None,
        step_seconds=steps,
        epoch_seconds=spread(seconds for run in runs for seconds in epoch_seconds(run)),
        images_per_second=spread(window.images_per_second for run in runs for window in timed(run)),
        startup_seconds=_median(run.startup_seconds for run in runs),
        total_seconds=_median(run.wall_seconds for run in done),
        final_loss=_median(run.final.get(loss) for run in done) if loss else None,
        final_accuracy=_median(run.final.get(accuracy) for run in done) if accuracy else None,
        fid=_median(run.final.get("fid") for run in done),
        peak_memory_gib=_most(run.peak_memory_gib for run in runs),
        peak_gpu_memory_gib=_most(each.gpu_memory_gib for run in runs for each in (*run.reports, *run.epochs)),
        loss_name=loss,
        accuracy_name=accuracy,
        images=_common(_product(run.steps, run.examples_per_step) for run in runs),
    )


_SIMULATED = "its devices are simulated, which says nothing of real ones"


UNSAID = "run.json does not say where it ran"


def _uncosted(row: Row, on_this_machine: bool) -> str:
    """Why the seconds measured are not those of the machines that the price is of; nothing where they are."""
    if row.simulated:
        return _SIMULATED
    if on_this_machine and row.kind == UNKNOWN:
        return UNSAID
    cure = f"give --price_per_hour={row.tier}=USD, the price of this one"
    return f"it ran on this machine, not on one of that price: {cure}" if on_this_machine else ""


def _priced(row: Row, price: float | None, costed: bool) -> Row:
    """`row` with its price in USD an hour and, where that is the price of the seconds measured, its costs."""
    speed, usd = row.images_per_second.median if row.images_per_second else None, price if costed else None
    return replace(
        row,
        price_per_hour=price,
        cost=_product(usd, row.total_seconds, 1 / 3600),
        cost_per_million_images=_product(usd, 1 / 3600, 1e6 / speed if speed else None),
    )


def _against(row: Row, first: Row) -> Row:
    """`row` with its speed-up and, where the devices are real and of one kind, its efficiency against `first`."""
    if _no_speed(row) or _no_speed(first) or row.images_per_second is None or first.images_per_second is None:
        return row
    speed_up = row.images_per_second.median / first.images_per_second.median
    alike = row.kind == first.kind != UNKNOWN and not (row.simulated or first.simulated)
    return replace(row, speed_up=speed_up, efficiency=speed_up * first.devices / row.devices if alike else None)


def _no_speed(row: Row) -> bool:
    return row.state != "done" or row.images_per_second is None


def _explained(row: Row, runs: Sequence[Run], first: Row, uncosted: str) -> Row:
    """`row` with the reason of each missing value."""
    ended = _how_it_ended(runs)
    kept = ended or "result.json does not hold it"
    untold = next((run.untold for run in runs if run.untold), "")
    untimed = ended or untold or "fewer than two reports were timed: lower report_every_steps"
    no_speed = ended or f"{row.tier if _no_speed(row) else first.tier} has no finished run that gives images/s"
    unpriced = f"the price is not known: give --price_per_hour={row.tier}=USD"
    reasons = {
        "machine": "the job directory names no machine",
        **dict.fromkeys(("batch_per_replica", "global_batch"), ended or "run.json does not hold it"),
        "steps": ended or "the repeats differ, or do not say",
        **dict.fromkeys(("warmup_steps", "step_seconds", "images_per_second"), untimed),
        "epoch_seconds": ended or "no full epoch after the first, which is warm-up",
        "speed_up": no_speed,
        "efficiency": no_speed if row.speed_up is None else _not_alike(row, first),
        **dict.fromkeys(("startup_seconds", "total_seconds", "final_loss", "peak_memory_gib"), kept),
        "price_per_hour": unpriced,
        "cost": ended or uncosted or "its price or its total time is missing",
        "cost_per_million_images": ended or uncosted or (unpriced if row.price_per_hour is None else untimed),
        "final_accuracy": ended or "the model reports no accuracy",
        "fid": ended or "the run computed none: give --fid_every_steps",
        "peak_gpu_memory_gib": ended or "stats.jsonl tells of no GPU",
    }
    return replace(row, missing={key: reason for key, reason in reasons.items() if getattr(row, key) is None})


def _not_alike(row: Row, first: Row) -> str:
    """Why the devices of two tiers are not held against each other."""
    if row.simulated:
        return _SIMULATED
    if first.simulated:
        return f"the devices of {first.tier} are simulated"
    if UNKNOWN in (row.kind, first.kind):
        return UNSAID
    return f"its devices are of another kind than those of {first.tier}"


def _how_it_ended(runs: Sequence[Run]) -> str:
    """Why values of a tier may be missing; nothing where a run of it is done."""
    if any(run.state == "done" for run in runs):
        return ""
    if not runs:
        return "it was not run"
    return runs[-1].ending


def _simulated(group: TierRuns, at_desk: bool) -> str:
    """In words, which machines or devices were not real."""
    tier, on_cpu = group.tier, _on_cpu(group)
    if on_cpu and (any(run.simulated for run in group.runs) or (tier and tier.accelerators)):
        return f"{tier.accelerator_type if tier else 'accelerators'} simulated on a CPU"
    if on_cpu and _devices(group) > _workers(group):
        return "logical devices of one CPU"
    return "all workers on one machine" if at_desk and _workers(group) > 1 else ""


def _on_cpu(group: TierRuns) -> bool:
    devices = [device for run in group.runs for device in run.devices]
    return bool(devices) and all(device.startswith("CPU") for device in devices)


def _kind(group: TierRuns, at_desk: bool) -> str:
    """The accelerator or, without one, the machine; CPU or GPU of a run without a tier, or here, that names no GPU."""
    named = next((run.gpus[0] for run in group.runs if run.gpus), "")
    if named:
        return accelerator_of(named)
    called = next((run.devices[0].partition(":")[0] for run in group.runs if run.devices), "")
    if group.tier is None or at_desk:
        return called or UNKNOWN
    return group.tier.accelerator_type or group.tier.machine_type


def _workers(group: TierRuns) -> int:
    return max((run.workers for run in group.runs), default=group.tier.workers if group.tier else 1)


def _devices(group: TierRuns) -> int:
    planned = group.tier.devices if group.tier else 1
    return max((run.replicas or len(run.devices) or planned for run in group.runs), default=planned)


def _common(values: Iterable[Any]) -> Any:
    """What all agree on, or None."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _most(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


def _product(*factors: Any) -> Any:
    """The product, or None where a factor is."""
    product = 1
    for factor in factors:
        if factor is None:
            return None
        product *= factor
    return product
