"""Reads run.json, stats.jsonl and result.json of a job directory into a RunRecord.

Missing or damaged files cost only the values that they contained: they never make the report fail.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base.run_files.goodput import OTHER, classes_of
from trainer.base.run_files.job_files import (
    BILLED,
    RESULT,
    RUN_INFO,
    SAMPLE_FILES,
    STATS,
    StatsEntry,
    items,
    mapping,
    number,
    positive,
    read_json,
    read_stats,
    whole,
)


class StatsLine:
    """Holds one line of stats.jsonl, which has means over the steps since the previous line of its kind.

    `warm_up`: it is the first of its kind, or the first after a restart, in which call sizes grow and caches fill.
    """

    def __init__(self, entry: StatsEntry, first: bool) -> None:
        self.entry, self.step = entry, entry["step"]
        self.warm_up = first or bool(whole(entry.get("untimed_steps")))
        self.step_seconds = positive(entry.get("step_seconds"))
        self.scalars = _scalars(entry)
        # The share of the step that was lost waiting for the batch.
        waited = number(entry.get("input_wait_seconds"))
        known = self.step_seconds and waited is not None
        self.input_wait = min(1.0, max(0.0, (waited or 0.0) / (self.step_seconds or 1.0))) if known else None


class RunRecord:
    """Reads what one job directory contains. Unknown values are None, a missing or damaged file is {}.

    Only calls to the device are timed, not saving, sampling and evaluation, nor the call that traces the graph.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info, info_problem = read_json(folder / RUN_INFO)
        self.result, result_problem = read_json(folder / RESULT)
        entries, stats_problem = read_stats(folder)
        self.problems = tuple(filter(None, (info_problem, result_problem, stats_problem)))
        self.reports, self.epochs = _lines(entries, "report"), _lines(entries, "epoch")
        self._timing = self.reports if after_warm_up(self.reports) else self.epochs
        self.last_step = max((line.step for line in (*self.reports, *self.epochs)), default=None)
        absent = "contains no report" if (folder / STATS).is_file() else "is missing"
        self.no_stats = "" if self.last_step is not None else f"{STATS} {absent}"
        # done, interrupted, failed, running; missing or unknown if result.json is missing or damaged
        self.state = str(self.result.get("state") or ("unknown" if (folder / RESULT).is_file() else "missing"))
        self.config = mapping(self.info, "config")
        self.devices = [*map(str, items(self.info, "devices"))]  # of each worker
        self.steps_per_epoch = whole(mapping(self.info, "data").get("steps_per_epoch"))
        steps = whole(self.result.get("steps"))
        self.steps = self.last_step if steps is None else steps
        self.startup_seconds = number(self.result.get("startup_seconds"))  # to the end of the first step
        self.wall_seconds = number(self.result.get("wall_seconds"))  # of all processes
        self.billed_seconds, self.billed_usd = billed(folder)
        self.restarts = whole(self.result.get("restarts")) or 0
        # The newest value of each loss and metric; means over an epoch do not count.
        lines = (line for line in entries if line["kind"] != "epoch")
        newest = {name: value for line in lines for name, value in _scalars(line).items()}
        self.final = _scalars(final) if (final := mapping(self.result, "final")) else newest

    @property
    def timed(self) -> list[StatsLine]:
        """Returns the lines that time the steps, without the warm-up: reports or, if none is left, epochs."""
        return after_warm_up(self._timing)

    @property
    def warm_up_steps(self) -> int:
        """Returns the number of steps that are left out."""
        starts = [0, *(line.step for line in self._timing)]
        return sum(line.step - start for line, start in zip(self._timing, starts, strict=False) if line.warm_up)

    @property
    def epoch_seconds(self) -> list[float]:
        """Returns the seconds of training in each epoch after the warm-up."""
        lines, steps = after_warm_up(self.epochs), self.steps_per_epoch
        return [line.step_seconds * steps for line in lines if line.step_seconds and steps]

    @property
    def gpu_memory_gib(self) -> list[float | None]:
        """Returns the memory of each GPU in each report and epoch."""
        gpus = [gpu for line in (*self.reports, *self.epochs) for gpu in items(line.entry, "gpus")]
        return [number(gpu.get("memory_gib")) for gpu in gpus if isinstance(gpu, dict)]

    @property
    def ending(self) -> str:
        """Returns how the run ended, as text that follows a colon."""
        if self.state == "running":
            last = "no report" if self.last_step is None else f"last report: step {self.last_step:,}"
            return f"it has not ended, or was killed ({last})"
        if self.state in ("missing", "unknown"):
            return f"{RESULT} is {'missing' if self.state == 'missing' else 'damaged'}"
        error = self.result.get("error")
        return f"the run ended as '{self.state}'{f': {error}' if error else ''}"

    @property
    def goodput(self) -> dict[str, float]:
        """Returns the seconds of each class, of those that were paid for; {} if they are not known."""
        if classes := classes_of(self.result):
            classes[OTHER] += max(0.0, (self.billed_seconds or 0.0) - sum(classes.values()))
        return classes

    @property
    def sample(self) -> Path | None:
        """Returns the newest grid of generated images."""
        return max(self.folder.glob(SAMPLE_FILES), default=None)

    @property
    def quality(self) -> str:
        """Returns what measures of images must have in common to be compared; "" without such."""
        about = mapping(mapping(self.result, "final"), "quality")
        parts = {"features": "features_sha256", "images": "samples", "formulas": "formulas"}
        return ", ".join(f"{name} {about.get(key)}" for name, key in parts.items()) if about else ""


def billed(folder: Path) -> tuple[float | None, float | None]:
    """Returns the seconds and the USD of all jobs that wrote into a run's folder; None if one is unknown."""
    jobs = [job for job in mapping(read_json(folder / BILLED)[0], "jobs").values() if isinstance(job, Mapping)]
    bills = ([number(job.get(unit)) for job in jobs] for unit in ("seconds", "usd"))
    seconds, usd = (sum(filter(None, bill)) if bill and None not in bill else None for bill in bills)
    return seconds, usd


def after_warm_up(lines: Sequence[StatsLine]) -> list[StatsLine]:
    """Returns the timed lines, without the first of each start."""
    return [line for line in lines if not line.warm_up and line.step_seconds is not None]


def _lines(entries: Iterable[StatsEntry], kind: str) -> tuple[StatsLine, ...]:
    of_kind = [entry for entry in entries if entry["kind"] == kind]
    return tuple(StatsLine(entry, index == 0) for index, entry in enumerate(of_kind))


def _scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    values = {**mapping(entry, "losses"), **mapping(entry, "metrics")}
    return {name: valid for name, value in values.items() if (valid := number(value)) is not None}
