"""Defines the measures of a tier: MEASURES is the one list from which tables, CSV, JSON, pages and notes are made.

A measure is read from each run and combined over the repeats of a tier, or it is read from the tier or is a property of
TierSummary. A new measure is one entry in MEASURES.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deploy.report.collection import Collection, TierRuns
from deploy.report.formatting import figures, money, percent
from deploy.report.run_reader import RunRecord
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import check_tiers
from trainer.base.run_files.goodput import share_of_steps
from trainer.base.run_files.job_files import RESULT, RUN_INFO, STATS, items, mapping, number, positive, whole
from trainer.base.settings.accelerators import accelerator_of

# Names of losses; the first that a run reports is its loss in a report.
LOSSES = ("val_loss", "loss", "critic_loss", "generator_loss", "discriminator_loss")
UNKNOWN = "unknown"  # the kind of a tier's devices if no run names it
MIXED = "its repeats differ"  # the quality of a tier whose repeats computed it in different ways
SIMULATED = "its devices are simulated, so its speed does not apply to real ones"
_NO_PRICE = "the price is not known: use --price_per_hour=TIER=USD"
_NO_WORK = "the work of its steps, or the rate of its devices, is not known"
_NO_INFO, _NO_RESULT = f"{RUN_INFO} does not contain it", f"{RESULT} does not contain it"


@dataclass(frozen=True)
class Spread:
    """Holds a median with its quartiles, and the number of values."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Returns the median and the quartiles of the values that are not None; None without any."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < 2:
        return Spread(numbers[0], numbers[0], numbers[0], 1) if numbers else None
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return Spread(middle, low, high, len(numbers))


def with_spread(value: Spread, factor: float = 1.0) -> str:
    """Formats the median and, of several values, the quartiles, multiplied by `factor`: `8.10 (7.90 - 8.40)`."""
    middle, low, high = (figures(factor * part) for part in (value.median, value.low, value.high))
    return middle if value.count == 1 else f"{middle} ({low} - {high})"


def milliseconds(value: Spread) -> str:
    """Formats a spread of seconds in ms."""
    return with_spread(value, 1e3)


def median(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are not None; None without any."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def largest(values: Iterable[Any]) -> Any:
    """Returns the largest of the values that are not None; None without any."""
    return max((value for value in values if value is not None), default=None)


def common(values: Iterable[Any]) -> Any:
    """Returns the one value that all are equal to; None if they differ or there are none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _product(*factors: Any) -> Any:
    """Returns the product; None if a factor is None."""
    return None if None in factors else math.prod(factors)


class TierSummary:
    """Holds the repeats of one tier and its measures, each an attribute that is None without a value: `row.mfu`.

    `local`: the tier ran on this machine; `usd`: the price of an hour of all machines, if the user gave one; `base`:
    the tier that speed-ups relate to; `wanted_quality`: measures of images count only if they were computed with this
    `quality`.
    """

    def __init__(self, group: TierRuns, local: bool, usd: float | None) -> None:
        self.group, self.facts, self.local = group, group.tier, local
        self.price_per_hour = group.tier.price_per_hour if usd is None and group.tier else usd
        self.on_this_machine = local and usd is None  # then the tier's price does not apply to the measured seconds
        self.done = tuple(run for run in group.runs if run.state == "done")
        self.runs: Sequence[RunRecord] = self.done or group.runs  # the runs that are measured
        self.base, self.wanted_quality = self, ""

    def __getattr__(self, key: str) -> Any:
        """Computes the measure `key` over the repeats, stores it as an attribute and returns it."""
        measure = _BY_KEY.get(key)
        if measure is None or measure.read is None:
            raise AttributeError(f"no measure is called {key}")
        if measure.combine is None:
            value = measure.read(self)
        else:
            values = [measure.read(run) for run in self.runs]
            value = measure.combine(part for each in values for part in (each if isinstance(each, list) else [each]))
        vars(self)[key] = value
        return value

    @cached_property
    def values(self) -> dict[str, Any]:
        """Returns the values of all measures, by key."""
        return {key: getattr(self, key) for key in _BY_KEY}

    @cached_property
    def missing(self) -> dict[str, str]:
        """Returns the reason for each value that is None, by key; a value whose absence needs no reason is left out."""
        reasons = {}
        for measure in (measure for measure in MEASURES if self.values[measure.key] is None):
            reason = measure.missing(self) if callable(measure.missing) else measure.missing
            if reason:
                reasons[measure.key] = reason if measure.planned else self.not_done or reason
        return reasons

    @property
    def not_done(self) -> str:
        """Returns why no run of the tier is done: how its last run ended; "" if one is done."""
        if self.done:
            return ""
        return self.group.runs[-1].ending if self.group.runs else "it was not run"

    @cached_property
    def kind(self) -> str:
        """Returns the accelerator or, if there is none, the machine type.

        For a run that names no GPU and was local, or whose tier is not known, it is CPU, GPU or UNKNOWN.
        """
        runs = self.group.runs
        gpu = next((str(gpus[0]) for run in runs if (gpus := [*filter(None, items(run.info, "gpus"))])), "")
        if gpu:
            return accelerator_of(gpu, load_machines().accelerators)
        if self.facts is None or self.local:
            return next((run.devices[0].partition(":")[0] for run in runs if run.devices), "") or UNKNOWN
        return self.facts.kind

    @property
    def workers(self) -> int:
        """Returns the largest number of workers that a run had; the tier's number if nothing was run."""
        counts = (whole(mapping(run.info, "cluster").get("workers")) or 1 for run in self.group.runs)
        return max(counts, default=self.facts.workers if self.facts else 1)

    @property
    def devices(self) -> int:
        """Returns the largest number of replicas that a run had; the tier's number if it is not known."""
        planned = self.facts.devices if self.facts else 1
        counts = (whole(mapping(run.info, "cluster").get("replicas")) or len(run.devices) for run in self.group.runs)
        return max((count or planned for count in counts), default=planned)

    @property
    def simulated(self) -> str:
        """Returns which machines or devices were simulated, in words; "" if all were real."""
        runs, facts = self.group.runs, self.facts
        devices = [device for run in runs for device in run.devices]
        on_cpu = devices and all(device.startswith("CPU") for device in devices)
        if on_cpu and (any(run.info.get("simulated") is True for run in runs) or (facts and facts.accelerators)):
            return f"{facts.accelerator_type if facts else 'accelerators'} simulated on a CPU"
        if on_cpu and self.devices > self.workers:
            return "logical devices of one CPU"
        return "all workers on one machine" if self.local and self.workers > 1 else ""

    @property
    def unit(self) -> str:
        """Returns what the runs count: images, examples, or the steps of a script that counts no examples."""
        unit = common(str(mapping(run.info, "data").get("unit")) for run in self.runs)
        return unit if unit in ("examples", "steps") else "images"

    @property
    def has_speed(self) -> bool:
        """Returns whether a run is done and its images per second are known."""
        return bool(self.done) and self.images_per_second is not None

    @property
    def speed_up(self) -> Any:
        """Returns how many times as fast as the base tier this tier is; None if a speed is not known."""
        both = self.has_speed and self.base.has_speed
        return self.images_per_second.median / self.base.images_per_second.median if both else None

    @property
    def efficiency(self) -> Any:
        """Returns the speed-up divided by the ratio of the numbers of devices.

        Returns None unless the devices of this tier and the base tier are real and of one kind.
        """
        comparable = self.kind == self.base.kind != UNKNOWN and not (self.simulated or self.base.simulated)
        return self.speed_up * self.base.devices / self.devices if comparable and self.speed_up is not None else None

    @property
    def on_vertex(self) -> bool:
        """Returns whether the tier ran on Vertex AI."""
        compared = self.facts is not None and not self.local
        return compared or any(run.info.get("on_vertex") is True for run in self.group.runs)

    @property
    def unbilled(self) -> bool:
        """Returns whether the tier ran on Vertex AI and the billed seconds are not recorded."""
        return self.on_vertex and self.paid_seconds is None

    @property
    def no_cost(self) -> str:
        """Returns why the tier's price does not apply to the measured seconds; "" if it does."""
        if self.simulated:
            return SIMULATED
        if self.on_this_machine and self.kind == UNKNOWN:
            return f"{RUN_INFO} does not state where it ran"
        fix = f"use --price_per_hour={self.tier}=USD with the price of this machine"
        return f"it ran on this machine, not on the machines of that price: {fix}" if self.on_this_machine else ""

    @property
    def cost(self) -> Any:
        """Returns what a run cost: the paid seconds or, if it was not billed, all its seconds, at the tier's price.

        Without a price it is what Vertex AI billed. Returns None if the price does not apply, or a number is missing.
        """
        if self.no_cost or self.unbilled:
            return None
        seconds = self.total_seconds if self.paid_seconds is None else self.paid_seconds
        return self.billed_usd if self.price_per_hour is None else _product(self.price_per_hour, seconds, 1 / 3600)

    @property
    def cost_per_million_images(self) -> Any:
        """Returns USD per million images; None if the price or the speed is not known, or they do not go together."""
        seconds = 1e6 / self.images_per_second.median if self.images_per_second else None
        return None if self.no_cost else _product(self.price_per_hour, 1 / 3600, seconds)

    @property
    def quality(self) -> str:
        """Returns what measures of generated images were computed with; MIXED if the runs differ, "" without any."""
        qualities = {run.quality for run in self.done}
        return MIXED if len(qualities) > 1 else "".join(qualities)

    def first_name(self, names: Iterable[str], have: Callable[[Iterable[bool]], bool]) -> str | None:
        """Returns the first of `names` with a final value in all runs (`have` is all) or in any run (any), or None."""
        return next((name for name in names if self.done and have(name in run.final for run in self.done)), None)


@dataclass(frozen=True)
class Measure:
    """Describes a measure of a tier.

    `key`: its name in CSV and JSON. `title`: its name in tables, with the unit; "" if tables do not show it. `read`:
    returns its value, or a list of values, of a run; without `combine` it takes the TierSummary instead of a run, and
    None stands for a property of TierSummary. `combine`: makes one value of those of all repeats. `show`: formats the
    value. `missing`: the reason why a tier with finished runs has no value, or a function of the tier that returns it.
    `planned`: a tier has it before a run is done.
    """

    key: str
    title: str = ""
    read: Callable[[Any], Any] | None = None
    combine: Callable[[Iterable[Any]], Any] | None = None
    show: Callable[[Any], str] = str
    missing: str | Callable[[TierSummary], str] = ""
    planned: bool = False


def _result(key: str) -> Callable[[RunRecord], float | None]:
    """Returns a function that reads a number of a run's result.json."""
    return lambda run: number(run.result.get(key))


def _info(part: str, key: str) -> Callable[[RunRecord], int | None]:
    """Returns a function that reads a count from a part of a run's run.json."""
    return lambda run: whole(mapping(run.info, part).get(key))


def _timed(key: str) -> Callable[[RunRecord], list[float | None]]:
    """Returns a function that reads a number from each line of a run's stats.jsonl that times steps."""
    return lambda run: [positive(line.entry.get(key)) for line in run.timed]


def _last(key: str) -> Callable[[TierSummary], float | None]:
    """Returns a function that reads the final value of the loss or accuracy that the measure `key` names."""
    return lambda row: median(run.final.get(getattr(row, key) or "") for run in row.done)


def _not_timed(row: TierSummary) -> str:
    no_stats = (run.no_stats for run in row.group.runs if run.no_stats)
    return next(no_stats, "fewer than two reports were timed: lower report_every_steps")


def _no_speed(row: TierSummary) -> str:
    return f"{row.base.tier if row.has_speed else row.tier} has no finished run with images/s"


def _no_efficiency(row: TierSummary) -> str:
    kinds = f"its devices, or those of {row.base.tier}, are simulated, not known or of another kind"
    return _no_speed(row) if row.speed_up is None else row.no_cost if row.simulated else kinds


def _no_quality(row: TierSummary) -> str:
    if any(run.quality for run in row.group.runs):
        return "its features, images or formulas differ from those that it would be compared with"
    images = any(run.sample for run in row.group.runs)
    return "the run did not compute it: use --fid_every_steps" if images else "the run generated no images"


def _of_images(name: str, title: str) -> Measure:
    """Returns the Measure of a quality of generated images.

    A tier lacks it unless it was computed as on the first tier that has one.
    """

    def read(row: TierSummary) -> float | None:
        return median(run.final.get(name) for run in row.done) if row.quality == row.wanted_quality else None

    return Measure(name, title, read, None, figures, _no_quality)


MEASURES = (
    Measure("tier", "tier", lambda row: row.group.name),
    Measure("state", "state", lambda row: row.runs[0].state if row.runs else "missing"),
    Measure("machine", "machine", lambda row: row.facts and row.facts.machine,
            missing="the job directory does not state the machine", planned=True),
    Measure("kind"),
    Measure("workers"),
    Measure("devices", "devices"),
    Measure("simulated"),
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
    Measure("step_seconds", "ms/step", _timed("step_seconds"), spread, milliseconds, _not_timed),
    Measure("epoch_seconds", "s/epoch", lambda run: run.epoch_seconds, spread, with_spread,
            "no full epoch after the first, which is warm-up"),
    Measure("images_per_second", "images/s", _timed("images_per_second"), spread, with_spread, _not_timed),
    Measure("speed_up", "speed-up", None, None, "{:.2f} x".format, _no_speed),
    Measure("efficiency", "efficiency", None, None, percent, _no_efficiency),
    Measure("tflop_per_second", "TFLOP/s", _timed("tflop_per_second"), spread, with_spread, _NO_WORK),
    Measure("mfu", "MFU", _timed("mfu"), median, lambda share: f"{figures(100 * share, 2)} %", _NO_WORK),
    Measure("input_wait", "waits for input", lambda run: [line.input_wait for line in run.timed], median, percent,
            lambda row: f"{STATS} does not contain it" if row.step_seconds else _not_timed(row)),
    Measure("startup_seconds", "start-up s", _result("startup_seconds"), median, figures, _NO_RESULT),
    Measure("training_seconds", "training s", _result("training_seconds"), median, figures, _NO_RESULT),
    Measure("total_seconds", "total s", lambda run: run.wall_seconds if run.state == "done" else None, median, figures,
            _NO_RESULT),
    Measure("goodput", "goodput", lambda run: share_of_steps(run.goodput), median, percent, _NO_RESULT),
    Measure("paid_seconds", "paid s", lambda run: run.billed_seconds, median, figures,
            "no job of Vertex AI is recorded"),
    Measure("billed_usd", "", lambda run: run.billed_usd, median),
    Measure("price_per_hour", "price an hour", None, None, money, _NO_PRICE, planned=True),
    Measure("cost", "paid", None, None, money,
            lambda row: row.no_cost or ("what Vertex AI billed is not recorded" if row.unbilled else
                                        "its price or its total time is missing")),
    Measure("cost_per_million_images", "cost per million images", None, None, money,
            lambda row: row.no_cost or (_NO_PRICE if row.price_per_hour is None else _not_timed(row))),
    Measure("final_loss", "final loss", _last("loss_name"), None, figures, _NO_RESULT),
    Measure("final_accuracy", "final accuracy", _last("accuracy_name"), None, "{:.4f}".format,
            "the model reports no accuracy"),
    _of_images("fid", "FID"),
    _of_images("coverage", "coverage"),
    Measure("peak_memory_gib", "peak memory GiB", _result("peak_memory_gib"), largest, figures, _NO_RESULT),
    Measure("peak_gpu_memory_gib", "peak GPU memory GiB", lambda run: run.gpu_memory_gib, largest, figures,
            f"{STATS} contains no GPU memory"),
    Measure("loss_name", "", lambda row: row.first_name(LOSSES, all)),
    Measure("accuracy_name", "", lambda row: row.first_name(("val_accuracy", "accuracy"), any)),
    Measure("images", "", lambda run: _product(run.steps, _info("data", "examples_per_step")(run)), common),
    Measure("unit"),
    Measure("quality"),
)  # fmt: skip
_BY_KEY = {measure.key: measure for measure in MEASURES}
# The measures that stand for a tier where there is room for few.
FIGURES = ("images_per_second", "speed_up", "cost_per_million_images", "final_loss")


def figures_of(tier: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values of FIGURES that a tier of table.json has; of a spread, its median."""
    values = {key: tier.get(key) for key in FIGURES}
    single = {key: value.get("median") if isinstance(value, Mapping) else value for key, value in values.items()}
    return {key: valid for key, value in single.items() if (valid := number(value)) is not None}


def best(rows: Sequence[TierSummary], key: str) -> TierSummary:
    """Returns the tier with the lowest cost, or the highest value of another measure, the first of equal ones.

    All `rows` must have a value.
    """
    values = {row.tier: getattr(row.values[key], "median", row.values[key]) for row in rows}
    return (min if key.startswith("cost") else max)(rows, key=lambda row: values[row.tier])


def in_units(text: str, rows: Sequence[TierSummary]) -> str:
    """Returns a text in which "images" is replaced by the unit that the runs count, unless some count images."""
    units = sorted({row.unit for row in rows if row.images_per_second} or {row.unit for row in rows})
    return text if "images" in units or not units else text.replace("images", units[0])


def summarize(
    collection: Collection, baseline: str = "", usd_by_tier: Mapping[str, float] | None = None
) -> list[TierSummary]:
    """Returns a summary of each tier; speed-ups relate to the tier `baseline`, by default the first.

    `usd_by_tier`: prices of one hour of all machines, which replace those in a comparison. Raises UserError if
    `baseline`, or a tier with a price, is not in the collection.
    """
    names, usd = [group.name for group in collection.tiers], usd_by_tier or {}
    check_tiers([*([baseline] if baseline else []), *usd], names)
    rows = [TierSummary(group, collection.local, usd.get(group.name)) for group in collection.tiers]
    quality = next((row.quality for row in rows if row.quality not in ("", MIXED)), "")
    for row in rows:
        row.base, row.wanted_quality = rows[names.index(baseline or names[0])], quality
    return rows
