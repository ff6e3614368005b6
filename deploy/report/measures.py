"""Declares what a report says of a tier: MEASURES, one table that rows, tables, CSV, JSON, pages and notes follow.

A new measure is one entry.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deploy.report.collection import Collection
from deploy.report.formatting import figures, milliseconds, money, percent, with_spread
from deploy.report.run_reader import RunRecord
from deploy.report.tier_summary import UNKNOWN, Measure, TierSummary, common, largest, median, spread
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import check_tiers
from trainer.base.run_files.goodput import share_of_steps
from trainer.base.run_files.records import RESULT, RUN_INFO, STATS, items, mapping, number, positive, whole
from trainer.base.settings.cards import accelerator_of
from trainer.base.settings.rules import FALLING

LOSSES = ("val_loss", "loss", "critic_loss", "generator_loss", "discriminator_loss")  # the first that a run reports
ACCURACIES = ("val_accuracy", "accuracy")
MIXED = "its repeats differ"
_NO_PRICE = "the price is not known: use --price_per_hour=TIER=USD"
_NO_WORK = "the work of its steps, or the rate of its devices, is not known"
_NO_INFO, _NO_RESULT = f"{RUN_INFO} does not contain it", f"{RESULT} does not contain it"
LOWER, HIGHER = "lower", "higher"


def _result(key: str) -> Callable[[RunRecord], float | None]:
    """Returns the function that reads a number of result.json."""
    return lambda run: number(run.result.get(key))


def _info(part: str, key: str) -> Callable[[RunRecord], int | None]:
    """Returns the function that reads a count in a part of run.json."""
    return lambda run: whole(mapping(run.info, part).get(key))


def _timed(key: str) -> Callable[[RunRecord], list[float | None]]:
    """Returns the function that reads a number of each line of stats.jsonl that times steps."""
    return lambda run: [positive(line.entry.get(key)) for line in run.timed]


def _input_wait(run: RunRecord) -> list[float]:
    """Returns the shares of the steps that were lost waiting for the batch."""
    waits = [(line.step_seconds, number(line.entry.get("input_wait_seconds"))) for line in run.timed]
    return [min(1.0, max(0.0, waited / seconds)) for seconds, waited in waits if seconds and waited is not None]


def _gpu_memory(run: RunRecord) -> list[float | None]:
    """Returns the memory of each GPU in each report and epoch."""
    gpus = [gpu for line in (*run.reports, *run.epochs) for gpu in items(line.entry, "gpus")]
    return [number(gpu.get("memory_gib")) for gpu in gpus if isinstance(gpu, dict)]


def _name(names: Iterable[str], have: Callable[[Iterable[bool]], bool]) -> Callable[[TierSummary], str | None]:
    """Returns the function that names the first loss or accuracy that all runs (or any run) of a tier have."""
    return lambda row: next((name for name in names if row.done and have(name in run.final for run in row.done)), None)


def _last(key: str) -> Callable[[TierSummary], float | None]:
    """Returns the function that reads the last value of what the measure `key` names."""
    return lambda row: median(run.final.get(getattr(row, key) or "") for run in row.done)


def _of_images(name: str, title: str) -> Measure:
    """Returns a measure of generated images, which the trainer computes, of those that compare with other tiers'."""

    def read(row: TierSummary) -> float | None:
        return median(run.final.get(name) for run in row.done) if row.quality == row.wanted_quality else None

    return Measure(name, title, read, None, figures, _no_quality, LOWER if name in FALLING else HIGHER)


def _quality(row: TierSummary) -> str:
    """Returns what the measures of images of all its runs were computed with."""
    qualities = {run.quality for run in row.done}
    return MIXED if len(qualities) > 1 else "".join(qualities)


def _kind(row: TierSummary) -> str:
    """Returns the accelerator or the machine; CPU or GPU if the run has no tier, or was local, and names no GPU."""
    runs = row.group.runs
    gpu = next((str(gpus[0]) for run in runs if (gpus := [*filter(None, items(run.info, "gpus"))])), "")
    if gpu:
        return accelerator_of(gpu, load_machines().accelerators)
    if row.facts is None or row.local:
        return next((run.devices[0].partition(":")[0] for run in runs if run.devices), "") or UNKNOWN
    return row.facts.kind


def _workers(row: TierSummary) -> int:
    """Returns the largest number of workers of a run; that of the tier if nothing was run."""
    counts = (whole(mapping(run.info, "cluster").get("workers")) or 1 for run in row.group.runs)
    return max(counts, default=row.facts.workers if row.facts else 1)


def _devices(row: TierSummary) -> int:
    """Returns the largest number of replicas of a run; that of the tier if it is not known."""
    planned = row.facts.devices if row.facts else 1
    counts = (whole(mapping(run.info, "cluster").get("replicas")) or len(run.devices) for run in row.group.runs)
    return max((count or planned for count in counts), default=planned)


def _simulated(row: TierSummary) -> str:
    """Describes which machines or devices were not real; "" if all were."""
    runs, facts = row.group.runs, row.facts
    devices = [device for run in runs for device in run.devices]
    on_cpu = devices and all(device.startswith("CPU") for device in devices)
    if on_cpu and (any(run.info.get("simulated") is True for run in runs) or (facts and facts.accelerators)):
        return f"{facts.accelerator_type if facts else 'accelerators'} simulated on a CPU"
    if on_cpu and row.devices > row.workers:
        return "logical devices of one CPU"
    return "all workers on one machine" if row.local and row.workers > 1 else ""


def _images(run: RunRecord) -> int | None:
    """Returns the number of images that the whole run read."""
    return _product(run.steps, _info("data", "examples_per_step")(run))


def _unit(row: TierSummary) -> str:
    """Returns what the runs count: images, examples, or the steps of a script that counts no examples."""
    unit = common(str(mapping(run.info, "data").get("unit")) for run in row.runs)
    return unit if unit in ("examples", "steps") else "images"


def _speed_up(row: TierSummary) -> float | None:
    both = row.has_speed and row.base.has_speed
    return row.images_per_second.median / row.base.images_per_second.median if both else None


def _efficiency(row: TierSummary) -> float | None:
    """Returns the speed-up of a device, if the devices are real and of one kind."""
    comparable = row.kind == row.base.kind != UNKNOWN and not (row.simulated or row.base.simulated)
    return row.speed_up * row.base.devices / row.devices if comparable and row.speed_up is not None else None


def _cost(row: TierSummary) -> float | None:
    """Returns what the run cost: on Vertex AI what was billed, elsewhere all its seconds at the given price."""
    if row.no_cost or row.unbilled:
        return None
    seconds = row.total_seconds if row.paid_seconds is None else row.paid_seconds
    return row.billed_usd if row.price_per_hour is None else _product(row.price_per_hour, seconds, 1 / 3600)


def _rate(row: TierSummary) -> float | None:
    """Returns USD per million images."""
    seconds = 1e6 / row.images_per_second.median if row.images_per_second else None
    return None if row.no_cost else _product(row.price_per_hour, 1 / 3600, seconds)


def _product(*factors: Any) -> Any:
    """Returns the product; None if a factor is None."""
    return None if None in factors else math.prod(factors)


def _not_timed(row: TierSummary) -> str:
    no_stats = (run.no_stats for run in row.group.runs if run.no_stats)
    return next(no_stats, "fewer than two reports were timed: lower report_every_steps")


def _no_speed(row: TierSummary) -> str:
    return f"{row.base.tier if row.has_speed else row.tier} has no finished run with images/s"


def _no_efficiency(row: TierSummary) -> str:
    kinds = f"its devices, or those of {row.base.tier}, are simulated, not known or of another kind"
    return _no_speed(row) if row.speed_up is None else row.no_cost if row.simulated else kinds


def _no_cost(row: TierSummary) -> str:
    unbilled = "what Vertex AI billed is not recorded" if row.unbilled else ""
    return row.no_cost or unbilled or "its price or its total time is missing"


def _no_rate(row: TierSummary) -> str:
    return row.no_cost or (_NO_PRICE if row.price_per_hour is None else _not_timed(row))


def _no_quality(row: TierSummary) -> str:
    if any(run.quality for run in row.group.runs):
        return "its features, images or formulas are others than those it would be compared with"
    images = any(run.sample for run in row.group.runs)
    return "the run did not compute it: use --fid_every_steps" if images else "the run generated no images"


MEASURES = (
    Measure("tier", "tier", lambda row: row.group.name),
    Measure("state", "state", lambda row: row.runs[0].state if row.runs else "missing"),
    Measure("machine", "machine", lambda row: row.facts and row.facts.machine,
            missing="the job directory does not state the machine", planned=True),
    Measure("kind", "", _kind),
    Measure("workers", "", _workers),
    Measure("devices", "devices", _devices),
    Measure("simulated", "", _simulated),
    Measure("depends_on_replicas", "",
            lambda row: any(run.result.get("depends_on_replicas") for run in row.group.runs)),
    Measure("not_compared", "",
            lambda row: next(filter(None, (run.result.get("not_compared") for run in row.group.runs)), "")),
    Measure("repeats", "repeats", lambda row: len(row.done)),
    Measure("batch_per_replica", "batch per replica", _info("cluster", "rows_per_replica"), common, str, _NO_INFO),
    Measure("global_batch", "global batch", _info("config", "global_batch_size"), common, str, _NO_INFO),
    Measure("steps", "steps", lambda run: run.steps, common, "{:,}".format,
            "the repeats differ, or do not state it"),
    Measure("warmup_steps", "", lambda run: run.warm_up_steps if run.timed else None, largest, missing=_not_timed),
    Measure("step_seconds", "ms/step", _timed("step_seconds"), spread, milliseconds, _not_timed, LOWER),
    Measure("epoch_seconds", "s/epoch", lambda run: run.epoch_seconds, spread, with_spread,
            "no full epoch after the first, which is warm-up", LOWER),
    Measure("images_per_second", "images/s", _timed("images_per_second"), spread, with_spread, _not_timed, HIGHER),
    Measure("speed_up", "speed-up", _speed_up, None, "{:.2f} x".format, _no_speed, HIGHER),
    Measure("efficiency", "efficiency", _efficiency, None, percent, _no_efficiency, HIGHER),
    Measure("tflop_per_second", "TFLOP/s", _timed("tflop_per_second"), spread, with_spread, _NO_WORK, HIGHER),
    Measure("mfu", "MFU", _timed("mfu"), median, lambda share: f"{figures(100 * share, 2)} %", _NO_WORK, HIGHER),
    Measure("input_wait", "waits for input", _input_wait, median, percent,
            lambda row: f"{STATS} does not contain it" if row.step_seconds else _not_timed(row), LOWER),
    Measure("startup_seconds", "start-up s", _result("startup_seconds"), median, figures, _NO_RESULT, LOWER),
    Measure("training_seconds", "training s", _result("training_seconds"), median, figures, _NO_RESULT, LOWER),
    Measure("total_seconds", "total s", lambda run: run.wall_seconds if run.state == "done" else None, median, figures,
            _NO_RESULT, LOWER),
    Measure("goodput", "goodput", lambda run: share_of_steps(run.goodput), median, percent, _NO_RESULT, HIGHER),
    Measure("paid_seconds", "paid s", lambda run: run.billed_seconds, median, figures,
            "no job of Vertex AI is recorded", LOWER),
    Measure("billed_usd", "", lambda run: run.billed_usd, median),
    Measure("price_per_hour", "price an hour", lambda row: row.price, None, money, _NO_PRICE, LOWER, planned=True),
    Measure("cost", "paid", _cost, None, money, _no_cost, LOWER),
    Measure("cost_per_million_images", "cost per million images", _rate, None, money, _no_rate, LOWER),
    Measure("final_loss", "final loss", _last("loss_name"), None, figures, _NO_RESULT, LOWER),
    Measure("final_accuracy", "final accuracy", _last("accuracy_name"), None, "{:.4f}".format,
            "the model reports no accuracy", HIGHER),
    _of_images("fid", "FID"),
    _of_images("coverage", "coverage"),
    Measure("peak_memory_gib", "peak memory GiB", _result("peak_memory_gib"), largest, figures, _NO_RESULT, LOWER),
    Measure("peak_gpu_memory_gib", "peak GPU memory GiB", _gpu_memory, largest, figures,
            f"{STATS} contains no GPU memory", LOWER),
    Measure("loss_name", "", _name(LOSSES, all)),
    Measure("accuracy_name", "", _name(ACCURACIES, any)),
    Measure("images", "", _images, common),
    Measure("unit", "", _unit),
    Measure("quality", "", _quality),
)  # fmt: skip


FIGURES = ("images_per_second", "speed_up", "cost_per_million_images", "final_loss")  # of a tier, at a glance


def figures_of(tier: Mapping[str, Any]) -> dict[str, float]:
    """Returns those of FIGURES that a tier of table.json has, of repeats the median."""
    values = {key: tier.get(key) for key in FIGURES}
    single = {key: value.get("median") if isinstance(value, Mapping) else value for key, value in values.items()}
    return {key: valid for key, value in single.items() if (valid := number(value)) is not None}


def best(rows: Sequence[TierSummary], key: str) -> TierSummary:
    """Returns the tier with the best value of a measure, which all of them have; the first of equal ones."""
    better = next(measure.better for measure in MEASURES if measure.key == key)
    values = {row.tier: getattr(row.values[key], "median", row.values[key]) for row in rows}
    return (min if better == LOWER else max)(rows, key=lambda row: values[row.tier])


def summarize(
    collection: Collection, baseline: str = "", usd_by_tier: Mapping[str, float] | None = None
) -> list[TierSummary]:
    """Returns a summary of each tier, compared with `baseline`, by default the first tier.

    `usd_by_tier`: prices of one hour of all machines, instead of those in a comparison. Raises UserError for an
    unknown tier.
    """
    names, usd, local = [group.name for group in collection.tiers], usd_by_tier or {}, collection.local
    check_tiers([*([baseline] if baseline else []), *usd], names)
    rows = [TierSummary(group, MEASURES, local, usd.get(group.name)) for group in collection.tiers]
    quality = next((row.quality for row in rows if row.quality not in ("", MIXED)), "")
    for row in rows:
        row.base, row.wanted_quality = rows[names.index(baseline or names[0])], quality
    return rows
