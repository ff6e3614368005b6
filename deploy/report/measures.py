"""Defines the measures of a tier: MEASURES is the one list from which tables, JSON and pages are
made.

A measure is read from each run and combined over the repeats of a tier, or it is read from the tier
or is a property of TierSummary. A new measure is one entry in MEASURES.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple

from deploy.report.collection import Collection, TierRuns
from deploy.report.formatting import figures, money, percent, span
from deploy.report.run_reader import RunRecord, total
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import TierFacts, check_tiers
from trainer.base.run_files.goodput import share_of_steps
from trainer.base.run_files.job_files import Content, items, mapping, number, positive, whole
from trainer.base.settings.accelerators import accelerator_of
from trainer.base.settings.train_config import MAY_CHANGE

# Names of losses; the first that a run reports is its loss in a report.
LOSSES = ("val_loss", "loss", "critic_loss", "generator_loss", "discriminator_loss")
UNKNOWN = "unknown"  # the kind of a tier's devices if no run names it


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
    if not numbers:
        return None
    several = numbers if numbers[1:] else 2 * numbers
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return Spread(middle, low, high, len(numbers))


def with_spread(value: Spread, factor: float = 1.0) -> str:
    """Formats the median and, of several values, the quartiles, multiplied by `factor`: `8.10 (7.90
    - 8.40)`."""
    middle, low, high = (figures(factor * part) for part in (value.median, value.low, value.high))
    return middle if value.count == 1 else f"{middle} ({low} - {high})"


def median(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are not None; None without any."""
    middle = spread(values)
    return middle.median if middle else None


def largest(values: Iterable[Any]) -> Any:
    """Returns the largest of the values that are not None; None without any."""
    return max((value for value in values if value is not None), default=None)


def common(values: Iterable[Any]) -> Any:
    """Returns the one value that all are equal to; None if they differ or there are none."""
    distinct = {*values}
    return distinct.pop() if len(distinct) == 1 else None


def loss_curve(run: RunRecord, name: str = "") -> tuple[list[int], list[float]]:
    """Returns the steps and the values of a loss, by default the first of LOSSES that the run
    reports."""
    lines = run.reports or run.epochs
    name = name or next(
        (loss for loss in LOSSES if any(loss in line.scalars for line in lines)), ""
    )
    reports = [line for line in lines if name in line.scalars]
    return [line.step for line in reports], [line.scalars[name] for line in reports]


class TierSummary:
    """Holds the repeats of one tier and its measures, each an attribute that is None without a
    value: `row.mfu`.

    `usd`: the price of an hour of all machines, if the user gave one; on the desk a tier has no
        other. `base`: the tier that speed-ups relate to; `wanted_quality`: measures of images count
        only if they were computed with this `quality`.
    """

    def __init__(self, group: TierRuns, usd: float | None) -> None:
        self.group = group
        self.facts = group.tier or TierFacts(group.name, "")
        # A comparison says where its runs ran, other runs say it themselves.
        places = [run.info.get("on_vertex") for run in group.runs]
        self.on_desk = group.local or (group.tier is None and False in places)
        self.on_vertex = not group.local if group.tier else True in places
        self.price_per_hour = self.facts.price_per_hour if usd is None and not self.on_desk else usd
        self.done = tuple(run for run in group.runs if run.state == "done")
        self.runs: Sequence[RunRecord] = self.done or group.runs  # the runs that are measured
        self.base = self
        self.wanted_quality = ""
        self.work: Content = {}  # what its runs did, which is equal in tiers that can be ranked

    def __getattr__(self, key: str) -> Any:
        """Computes the measure `key` over the repeats, stores it as an attribute and returns it."""
        measure = _BY_KEY.get(key)
        # Without both the measure is a property, which has raised an AttributeError itself.
        if measure is None or not (measure.read or measure.combine):
            raise AttributeError(f"no measure is called {key}")
        read = measure.read or attrgetter(key)
        if measure.combine is None:
            value = read(self)
        else:
            # A run has one value, or a list of them.
            values = []
            for of_run in map(read, self.runs):
                values += of_run if isinstance(of_run, list) else [of_run]
            value = measure.combine(values)
        vars(self)[key] = value
        return value

    @cached_property
    def values(self) -> dict[str, Any]:
        """Returns the values of all measures, by key; of a simulated tier none that depends on its
        machine."""
        hidden = _OF_MACHINE if self.simulated else ()
        values = {}
        for measure in MEASURES:
            values[measure.key] = None if measure in hidden else getattr(self, measure.key)
        return values

    @property
    def missing(self) -> list[str]:
        """Returns the reasons why the tier has no value of some measures."""
        reasons = [] if self.done else [self.not_done]
        if self.simulated:
            reasons.append(
                f"{self.simulated}: no time, speed or cost is shown, as they do not apply to real"
                " machines"
            )
        elif self.price_per_hour is None:
            reasons.append("its price is not known: use --price_per_hour=TIER=USD")
        elif self.on_vertex and self.total_seconds is None:
            reasons.append("what Vertex AI billed is not recorded")
        if self.done and not self.step_seconds:
            few = "fewer than two reports were timed: lower report_every_steps"
            reasons.append(self.done[0].no_stats or few)
        if self.done and self.quality not in ("", self.wanted_quality):
            reasons.append(
                "its features, images or formulas differ from those of the first tier with images"
            )
        return reasons

    @property
    def not_done(self) -> str:
        """Returns how the last run of a tier ended of which none is done."""
        return self.group.runs[-1].ending if self.group.runs else "it was not run"

    @cached_property
    def gpu(self) -> str:
        """Returns the model of the GPUs that the runs name; "" if they name none."""
        return next(
            (str(gpu) for run in self.group.runs for gpu in items(run.info, "gpus") if gpu), ""
        )

    @property
    def machine(self) -> str | None:
        """Returns the machine on which the tier ran; None if it is not known."""
        if not self.on_desk:
            return f"{self.facts.machine}{', spot' * self.group.spot}" or None
        processor = next(
            (run.info["processor"] for run in self.runs if run.info.get("processor")), ""
        )
        name = self.gpu or processor
        return f"this computer ({name})" if name else "this computer"

    @cached_property
    def kind(self) -> str:
        """Returns the accelerator or, if there is none, the machine type.

        For a run that names no GPU and was local, or whose tier is not known, it is CPU, GPU or
        UNKNOWN.
        """
        if self.gpu:
            return accelerator_of(self.gpu, load_machines().accelerators)
        if self.group.tier is None or self.on_desk:
            names = [run.devices[0].partition(":")[0] for run in self.group.runs if run.devices]
            return next(iter(names), "") or UNKNOWN
        return self.facts.kind

    @property
    def workers(self) -> int:
        """Returns the largest number of workers that a run had; the tier's number if nothing was
        run."""
        clusters = [mapping(run.info, "cluster") for run in self.group.runs]
        counts = [whole(cluster.get("workers")) or 1 for cluster in clusters]
        return max(counts, default=self.facts.workers)

    @property
    def devices(self) -> int:
        """Returns the largest number of replicas that a run had; the tier's number if it is not
        known."""
        counts = []
        for run in self.group.runs:
            replicas = whole(mapping(run.info, "cluster").get("replicas"))
            counts.append(replicas or len(run.devices) or self.facts.devices)
        return max(counts, default=self.facts.devices)

    @property
    def simulated(self) -> str:
        """Returns which machines or devices were simulated, in words; "" if all were real."""
        runs = self.group.runs
        devices = [device for run in runs for device in run.devices]
        on_cpu = devices and all(device.startswith("CPU") for device in devices)
        if on_cpu and (
            any(run.info.get("simulated") is True for run in runs) or self.facts.accelerators
        ):
            return f"{self.facts.accelerator_type or 'accelerators'} simulated on a CPU"
        if on_cpu and self.devices > self.workers:
            return "logical devices of one CPU"
        return "all workers on one machine" if self.on_desk and self.workers > 1 else ""

    @property
    def unit(self) -> str:
        """Returns what the runs count: images, examples, or the steps of a script that counts no
        examples."""
        unit = common(str(mapping(run.info, "data").get("unit")) for run in self.runs)
        return unit if unit in ("examples", "steps") else "images"

    @property
    def has_speed(self) -> bool:
        """Returns whether a run is done and its images per second are those of real devices."""
        return bool(self.done and self.images_per_second and not self.simulated)

    @property
    def speed_up(self) -> float | None:
        """Returns how many times as fast as the base tier this tier is; None if they did not do the
        same work."""
        ranked = self.has_speed and self.base.has_speed and self.work == self.base.work
        return (
            self.images_per_second.median / self.base.images_per_second.median if ranked else None
        )

    @property
    def efficiency(self) -> float | None:
        """Returns the speed-up divided by the ratio of the numbers of devices.

        Returns None unless the tier has other numbers of devices of the kind of the base tier.
        """
        ratio = self.devices / self.base.devices
        scaled = self.kind == self.base.kind != UNKNOWN and ratio != 1
        return self.speed_up / ratio if scaled and self.speed_up else None

    def seconds_of(self, run: RunRecord) -> float | None:
        """Returns the billed seconds of a run, or on a machine that nobody bills all its
        seconds."""
        return run.billed_seconds if self.on_vertex else run.wall_seconds

    def usd_of(self, run: RunRecord) -> float | None:
        """Returns what a run cost: `seconds_of` at the tier's price; without a price what Vertex AI
        billed."""
        seconds = self.seconds_of(run)
        if self.price_per_hour is None or seconds is None:
            return run.billed_usd
        return self.price_per_hour * seconds / 3600

    @property
    def total_seconds(self) -> float | None:
        """Returns how long a run took that is done, the median over the repeats, by
        `seconds_of`."""
        return median(map(self.seconds_of, self.done))

    @property
    def cost(self) -> float | None:
        """Returns what a run that is done cost, the median over the repeats; None if that is not
        known."""
        return None if self.simulated else median(map(self.usd_of, self.done))

    @property
    def paid(self) -> float | None:
        """Returns what Vertex AI billed for all runs, with attempts that failed; None if a bill is
        not known."""
        bills = []
        for run in self.group.runs:
            bills.append(self.usd_of(run) if run.billed_usd is None else run.billed_usd)
        return total(bills) if self.on_vertex else None

    @property
    def cost_per_million_images(self) -> float | None:
        """Returns USD per million images; None if the price or the speed is not known."""
        if not self.has_speed or self.price_per_hour is None:
            return None
        return float(self.price_per_hour / 3600 * 1e6 / self.images_per_second.median)

    @property
    def quality(self) -> Any:
        """Returns what measures of generated images were computed with, "" without any; None if the
        runs differ."""
        return common(run.quality for run in self.done)

    def first_name(self, *names: str) -> str | None:
        """Returns the first of `names` of which a run that is done has a final value; None if there
        is none."""
        return next((name for name in names if any(name in run.final for run in self.done)), None)


Rows = Sequence[TierSummary]


class Measure(NamedTuple):
    """Describes a measure of a tier.

    `key`: its name in JSON. `title`: its name in tables, with the unit; "" if tables do not show
        it. `combine`: makes one value of those of all repeats; without it the value is one of the
        TierSummary. `show`: formats the value. `read`: returns the value, or a list of values, of a
        run or a TierSummary; by default its attribute `key`.
    """

    key: str
    title: str = ""
    combine: Callable[[Iterable[Any]], Any] | None = None
    show: Callable[[Any], str] = str
    read: Callable[[Any], Any] | None = None


def _timed(key: str) -> Callable[[RunRecord], list[float | None]]:
    """Returns a function that reads a number from each line of a run's stats.jsonl that times
    steps."""
    return lambda run: [positive(line.entry.get(key)) for line in run.timed]


def _last(key: str) -> Callable[[TierSummary], float | None]:
    """Returns a function that reads the final value of the loss or accuracy that the measure `key`
    names."""
    return lambda row: median(run.final.get(getattr(row, key) or "") for run in row.done)


def _of_images(name: str, title: str) -> Measure:
    """Returns the Measure of a quality of generated images.

    A tier lacks it unless it was computed as on the first tier that has one.
    """

    def read(row: TierSummary) -> float | None:
        if row.quality != row.wanted_quality:
            return None
        return median(run.final.get(name) for run in row.done)

    return Measure(name, title, None, figures, read)


_OF_MACHINE = (  # what depends on the machine, and of simulated devices says nothing
    Measure("price_per_hour", "price an hour", show=money),
    Measure("total_seconds", "time of a run", show=lambda seconds: span(seconds / 3600)),
    Measure("cost", "cost of a run", show=money),
    Measure("images_per_second", "images/s", spread, with_spread, _timed("images_per_second")),
    Measure("speed_up", "speed-up", show="{:.2f} x".format),
    Measure("efficiency", "efficiency", show=percent),
    Measure("cost_per_million_images", "cost per million images, without start-up", show=money),
    Measure(
        "step_seconds", "ms/step", spread, partial(with_spread, factor=1e3), _timed("step_seconds")
    ),
    Measure("mfu", "MFU", median, lambda share: f"{figures(100 * share, 2)} %", _timed("mfu")),
    Measure("input_wait", "waits for input", median, percent),
    Measure("startup_seconds", "start-up s", median, figures),
    Measure("goodput", "goodput", median, percent, lambda run: share_of_steps(run.goodput)),
    Measure("peak_gpu_memory_gib", "peak GPU memory GiB", largest, figures),
)
MEASURES = (
    Measure("tier", "tier", read=lambda row: row.group.name),
    Measure("state", "state", read=lambda row: row.runs[0].state if row.runs else "missing"),
    Measure("machine", "machine"),
    Measure("kind"),
    Measure("workers"),
    Measure("devices", "devices"),
    Measure("simulated"),
    Measure("repeats", "repeats", read=lambda row: len(row.done)),
    Measure("global_batch", "global batch", common),
    Measure("steps", "steps", common, "{:,}".format),
    *_OF_MACHINE,
    Measure("paid", "paid in all", show=money),
    Measure("final_loss", "final loss", None, figures, _last("loss_name")),
    Measure("final_accuracy", "final accuracy", None, "{:.4f}".format, _last("accuracy_name")),
    _of_images("fid", "FID"),
    _of_images("coverage", "coverage"),
    Measure("loss_name", read=lambda row: row.first_name(*LOSSES)),
    Measure("accuracy_name", read=lambda row: row.first_name("val_accuracy", "accuracy")),
    Measure("unit"),
    Measure("quality"),
)
_BY_KEY = {measure.key: measure for measure in MEASURES}
# The measures that stand for a tier where there is room for few, and those of the first screen.
FIGURES = ("images_per_second", "speed_up", "cost_per_million_images", "final_loss")
FIRST = (
    "machine",
    "price_per_hour",
    "total_seconds",
    "cost",
    "images_per_second",
    "speed_up",
    "paid",
    "final_loss",
)


def figures_of(tier: Content) -> dict[str, float]:
    """Returns the values of FIGURES that a tier of table.json has; of a spread, its median."""
    numbers = dict[str, float]()
    for key in FIGURES:
        value = tier.get(key)
        value = number(value.get("median") if isinstance(value, Mapping) else value)
        if value is not None:
            numbers[key] = value
    return numbers


def in_units(text: str, rows: Rows) -> str:
    """Returns a text in which "images" is replaced by the unit that the runs count, unless some
    count images."""
    timed = [row for row in rows if row.images_per_second]
    units = sorted({row.unit for row in timed or rows})
    return text if "images" in units or not units else text.replace("images", units[0])


def summarize(
    collection: Collection, baseline: str = "", usd_by_tier: Mapping[str, float] | None = None
) -> list[TierSummary]:
    """Returns a summary of each tier; speed-ups relate to the tier `baseline`, by default the
    first.

    `usd_by_tier`: prices of one hour of all machines, which replace those in a comparison. Raises
        UserError if `baseline`, or a tier with a price, is not in the collection.
    """
    names = [group.name for group in collection.tiers]
    usd = usd_by_tier or {}
    check_tiers([*([baseline] if baseline else []), *usd], names)
    rows = [TierSummary(group, usd.get(group.name)) for group in collection.tiers]
    quality = next((row.quality for row in rows if row.quality), "")
    # With the batch of a replica the steps of an epoch differ as well, so that neither makes the
    # work another one.
    may_differ = MAY_CHANGE
    if collection.scaling == "weak":
        may_differ = may_differ | {"global_batch_size", "steps"}
    for row in rows:
        row.base = rows[names.index(baseline or names[0])]
        row.wanted_quality = quality
        settings = next((run.config for run in row.runs if run.config), {})
        work = {} if collection.scaling == "weak" else {"steps": row.steps}
        fixed = {name: value for name, value in settings.items() if name not in may_differ}
        row.work = work | fixed
    return rows
