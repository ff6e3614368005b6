"""Holds what a report says of one tier: its repeats, the values of their measures, and why a value is missing."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deploy.report.collection import TierRuns
from deploy.report.run_reader import RunRecord
from trainer.base.run_files.records import RUN_INFO


@dataclass(frozen=True)
class Spread:
    """Holds a median with its quartiles, and the number of values."""

    median: float
    low: float
    high: float
    count: int


def _numbers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Returns median and quartiles; None of no values."""
    numbers = _numbers(values)
    if len(numbers) < 2:
        return Spread(numbers[0], numbers[0], numbers[0], 1) if numbers else None
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return Spread(middle, low, high, len(numbers))


def median(values: Iterable[float | None]) -> float | None:
    """Returns the median; None of no values."""
    numbers = _numbers(values)
    return statistics.median(numbers) if numbers else None


def largest(values: Iterable[Any]) -> Any:
    """Returns the largest value; None of no values."""
    return max(_numbers(values), default=None)


def common(values: Iterable[Any]) -> Any:
    """Returns the value if all are equal; else None."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


UNKNOWN = "unknown"  # the kind of devices that no run names
SIMULATED = "its devices are simulated, so its speed does not apply to real ones"


@dataclass(frozen=True)
class Measure:
    """Describes a measure of a tier.

    `key`: its name in CSV and JSON; `title`: with the unit, "" for what tables do not show; `read`: its value in a run,
    or a list of values; `combine`: makes one value of those of all repeats; `show`: formats it; `missing`: why a tier
    that is done has none, or a function of the tier that says it; `better`: lower or higher values. Without `combine`,
    `read` takes the tier instead of a run. `planned`: a tier has it before a run is done.
    """

    key: str
    title: str
    read: Callable[[Any], Any]
    combine: Callable[[Iterable[Any]], Any] | None = None
    show: Callable[[Any], str] = str
    missing: "str | Callable[[TierSummary], str]" = ""
    better: str = ""
    planned: bool = False

    def value(self, row: "TierSummary") -> Any:
        """Returns the value over the repeats of a tier."""
        if self.combine is None:
            return self.read(row)
        values = [self.read(run) for run in row.runs]
        return self.combine(part for value in values for part in (value if isinstance(value, list) else [value]))

    def reason(self, row: "TierSummary") -> str:
        """Returns why the tier has no value; "" if that needs no words."""
        text = self.missing(row) if callable(self.missing) else self.missing
        return text if self.planned or not text else row.not_done or text


class TierSummary:
    """Holds one tier's repeats and the values of their measures, by key: `row.step_seconds`, or None.

    `local`: it ran on this machine; `usd`: an hour of all machines, if the user says so; `base`: the tier of the
    speed-ups; `wanted_quality`: what measures of images are compared with.
    """

    def __init__(self, group: TierRuns, measures: Iterable[Measure], local: bool, usd: float | None) -> None:
        self.measures = {measure.key: measure for measure in measures}
        self.group, self.facts, self.local = group, group.tier, local
        self.price = group.tier.price_per_hour if usd is None and group.tier else usd
        self.on_this_machine = local and usd is None  # so that the price is not that of its seconds
        self.done = tuple(run for run in group.runs if run.state == "done")
        self.runs: Sequence[RunRecord] = self.done or group.runs  # those that are measured
        self.base, self.wanted_quality = self, ""

    def __getattr__(self, key: str) -> Any:
        """Returns the value of a measure, and keeps it."""
        measure = vars(self).get("measures", {}).get(key)
        if measure is None:
            raise AttributeError(f"no measure is called {key}")
        value = vars(self)[key] = measure.value(self)
        return value

    @cached_property
    def values(self) -> dict[str, Any]:
        """Returns the value of every measure by its key."""
        return {key: getattr(self, key) for key in self.measures}

    @cached_property
    def missing(self) -> dict[str, str]:
        """Returns why a value is None, by key."""
        reasons = {key: self.measures[key].reason(self) for key, value in self.values.items() if value is None}
        return {key: reason for key, reason in reasons.items() if reason}

    @property
    def not_done(self) -> str:
        """Returns how the tier's runs ended; "" if one is done."""
        if self.done:
            return ""
        return self.group.runs[-1].ending if self.group.runs else "it was not run"

    @property
    def has_speed(self) -> bool:
        """Returns whether a run is done whose images per second are known."""
        return bool(self.done) and self.images_per_second is not None

    @property
    def on_vertex(self) -> bool:
        """Returns whether Vertex AI ran it."""
        compared = self.facts is not None and not self.local
        return compared or any(run.info.get("on_vertex") is True for run in self.group.runs)

    @property
    def unbilled(self) -> bool:
        """Returns whether Vertex AI ran it, and what it billed is not recorded."""
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


def in_units(text: str, rows: Sequence[TierSummary]) -> str:
    """Returns a title or sentence about images with the word for what the runs read, if that is another."""
    units = sorted({row.unit for row in rows if row.images_per_second} or {row.unit for row in rows})
    return text if "images" in units or not units else text.replace("images", units[0])
