"""Holds what a report says of one tier: its repeats, the values of their measures, and why a value is missing."""

from collections.abc import Sequence
from typing import Any

from deploy.report.collection import TierRuns
from deploy.report.run_reader import RunRecord
from deploy.tiers.machine_table import accelerator_of
from trainer.base.run_files.records import items, mapping, whole
from trainer.base.run_files.run_layout import RUN_INFO

UNKNOWN = "unknown"  # the kind of devices that no run names
UNKNOWN_MACHINE = f"{RUN_INFO} does not state where it ran"
SIMULATED = "its devices are simulated, so its speed does not apply to real ones"


class TierSummary:
    """Holds one tier's repeats and the values of `deploy.report.measures`, by key: `row.step_seconds`, or None.

    `price`: USD an hour of all machines; `on_this_machine`: whether it ran here, so that this price is not that of
    its seconds; `base`: the tier of the speed-ups; `missing`: why a value is None, by key.
    """

    def __init__(self, group: TierRuns, local: bool, price: float | None, on_this_machine: bool) -> None:
        self.group, self.facts, self.local = group, group.tier, local
        self.price, self.on_this_machine = price, on_this_machine
        self.done = tuple(run for run in group.runs if run.state == "done")
        self.runs: Sequence[RunRecord] = self.done or group.runs  # those that are measured
        self.base = self
        self.values: dict[str, Any] = {}
        self.missing: dict[str, str] = {}

    def __getattr__(self, key: str) -> Any:
        """Returns the value of a measure."""
        try:
            return vars(self)["values"][key]
        except KeyError:
            raise AttributeError(f"no measure is called {key}") from None

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
    def no_cost(self) -> str:
        """Returns why the tier's price does not apply to the measured seconds; "" if it does."""
        if self.simulated:
            return SIMULATED
        if self.on_this_machine and self.kind == UNKNOWN:
            return UNKNOWN_MACHINE
        fix = f"use --price_per_hour={self.tier}=USD with the price of this machine"
        return f"it ran on this machine, not on the machines of that price: {fix}" if self.on_this_machine else ""


def in_units(text: str, rows: Sequence[TierSummary]) -> str:
    """Returns a title or sentence about images with the word for what the runs read, if that is another."""
    units = sorted({row.unit for row in rows if row.images_per_second} or {row.unit for row in rows})
    return text if "images" in units or not units else text.replace("images", units[0])


def kind_of_devices(row: TierSummary) -> str:
    """Returns the accelerator or the machine; CPU or GPU if the run has no tier, or was local, and names no GPU."""
    runs = row.group.runs
    gpu = next((str(gpus[0]) for run in runs if (gpus := [*filter(None, items(run.info, "gpus"))])), "")
    if gpu:
        return accelerator_of(gpu)
    if row.facts is None or row.local:
        return next((run.devices[0].partition(":")[0] for run in runs if run.devices), "") or UNKNOWN
    return row.facts.kind


def count_of_workers(row: TierSummary) -> int:
    """Returns the largest number of workers of a run; that of the tier if nothing was run."""
    counts = (whole(mapping(run.info, "cluster").get("workers")) or 1 for run in row.group.runs)
    return max(counts, default=row.facts.workers if row.facts else 1)


def count_of_devices(row: TierSummary) -> int:
    """Returns the largest number of replicas of a run; that of the tier if it is not known."""
    planned = row.facts.devices if row.facts else 1
    counts = (whole(mapping(run.info, "cluster").get("replicas")) or len(run.devices) for run in row.group.runs)
    return max((count or planned for count in counts), default=planned)


def simulated_devices(row: TierSummary) -> str:
    """Describes which machines or devices were not real; "" if all were."""
    runs, facts = row.group.runs, row.facts
    devices = [device for run in runs for device in run.devices]
    on_cpu = devices and all(device.startswith("CPU") for device in devices)
    if on_cpu and (any(run.info.get("simulated") is True for run in runs) or (facts and facts.accelerators)):
        return f"{facts.accelerator_type if facts else 'accelerators'} simulated on a CPU"
    if on_cpu and count_of_devices(row) > count_of_workers(row):
        return "logical devices of one CPU"
    return "all workers on one machine" if row.local and count_of_workers(row) > 1 else ""
