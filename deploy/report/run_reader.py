"""Reads run.json, stats.jsonl and result.json of a job directory into a RunRecord.

Missing or damaged files never make a report fail; only the values that they contained are missing.
A run of a version before 0.3 is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainer.base.run_files.goodput import OTHER, seconds_by_class
from trainer.base.run_files.job_files import (
    BILLED,
    RESULT,
    SAMPLE_FILES,
    STATS,
    StatsEntry,
    items,
    losses_and_metrics,
    mapping,
    number,
    positive,
    read_json,
    read_run_info,
    read_stats,
    whole,
)


class StatsLine:
    """Holds one line of stats.jsonl; its values are means over the steps since the previous line of
    the same kind.

    `warm_up`: the line is the first of its kind, or the first after a restart; meanwhile caches
        fill, and the number of steps per call grows.
    """

    def __init__(self, entry: StatsEntry, first: bool) -> None:
        self.entry = entry
        self.step = entry["step"]
        self.warm_up = first or bool(whole(entry.get("untimed_steps")))
        self.step_seconds = positive(entry.get("step_seconds"))
        self.scalars = losses_and_metrics(entry)


class RunRecord:
    """Holds what one job directory contains.

    An unknown value is None, a missing or damaged file is {}.

    The times of steps are those of calls to the device, without saving, sampling and evaluation,
    and without the call that traces the graph.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info, info_problem = read_run_info(folder)
        self.result, result_problem = read_json(folder / RESULT)
        entries, stats_problem = read_stats(folder)
        self.problems = tuple(filter(None, (info_problem, result_problem, stats_problem)))
        self.reports = _lines(entries, "report")
        self.epochs = _lines(entries, "epoch")

        self.last_step = max((line.step for line in (*self.reports, *self.epochs)), default=None)
        absent = "contains no report" if (folder / STATS).is_file() else "is missing"
        self.no_stats = "" if self.last_step is not None else f"{STATS} {absent}"
        # The trainer's state (such as done, interrupted, failed or running); "missing" if there is
        # no result.json, and "unknown" if it is damaged.
        self.state = str(
            self.result.get("state") or ("unknown" if (folder / RESULT).is_file() else "missing")
        )
        self.config = mapping(self.info, "config")
        self.devices = [*map(str, items(self.info, "devices"))]  # of all workers
        self.steps_per_epoch = whole(mapping(self.info, "data").get("steps_per_epoch"))
        steps = whole(self.result.get("steps"))
        self.steps = self.last_step if steps is None else steps
        self.global_batch = whole(self.config.get("global_batch_size"))
        # until the end of the first step
        self.startup_seconds = number(self.result.get("startup_seconds"))
        # the sum over all starts of the run
        self.wall_seconds = number(self.result.get("wall_seconds"))
        self.billed_seconds, self.billed_usd = billed(folder)
        self.restarts = whole(self.result.get("restarts")) or 0
        # Without final values in result.json, the newest of each loss and metric; means over an
        # epoch do not count.
        lines = (line for line in entries if line["kind"] != "epoch")
        newest = {name: value for line in lines for name, value in losses_and_metrics(line).items()}
        final = mapping(self.result, "final")
        self.final = losses_and_metrics(final) if final else newest

    @property
    def timed(self) -> list[StatsLine]:
        """Returns the lines that time steps after the warm-up: reports or, if there are none,
        epochs."""
        return after_warm_up(self.reports) or after_warm_up(self.epochs)

    @property
    def input_wait(self) -> list[float]:
        """Returns the share of a step that was lost waiting for its batch, of each of `timed` that
        knows it."""
        pairs = [(number(line.entry.get("input_wait_seconds")), line) for line in self.timed]
        return [
            min(1.0, max(0.0, waited / line.step_seconds))
            for waited, line in pairs
            if waited is not None and line.step_seconds
        ]

    @property
    def peak_gpu_memory_gib(self) -> list[float | None]:
        """Returns the memory of each GPU in each report and epoch."""
        gpus = [gpu for line in (*self.reports, *self.epochs) for gpu in items(line.entry, "gpus")]
        return [number(gpu.get("memory_gib")) for gpu in gpus if isinstance(gpu, dict)]

    @property
    def ending(self) -> str:
        """Returns how the run ended, in words that can follow a colon."""
        if self.state == "running":
            last = (
                "no report" if self.last_step is None else f"last report: step {self.last_step:,}"
            )
            return f"it has not ended, or was killed ({last})"
        if self.state in ("missing", "unknown"):
            return f"{RESULT} is {'missing' if self.state == 'missing' else 'damaged'}"
        error = self.result.get("error")
        return f"the run ended as '{self.state}'{f': {error}' if error else ''}"

    @property
    def goodput(self) -> dict[str, float]:
        """Returns the seconds of each class of goodput; {} if they are not known.

        Seconds that were billed and that the run did not see count as OTHER.
        """
        if classes := seconds_by_class(self.result):
            classes[OTHER] += max(0.0, (self.billed_seconds or 0.0) - sum(classes.values()))
        return classes

    @property
    def sample(self) -> Path | None:
        """Returns the file of the newest grid of generated images; None if there is none."""
        return max(self.folder.glob(SAMPLE_FILES), default=None)

    @property
    def quality(self) -> str:
        """Returns what measures of generated images were computed with, which must be equal to
        compare; "" without."""
        about = mapping(mapping(self.result, "final"), "quality")
        parts = {"features": "features_sha256", "images": "samples", "formulas": "formulas"}
        return ", ".join(f"{name} {about.get(key)}" for name, key in parts.items()) if about else ""


def billed(folder: Path) -> tuple[float | None, float | None]:
    """Returns the billed seconds and USD of all jobs that wrote into a run's folder; each is None
    if a job lacks it."""
    entries = mapping(read_json(folder / BILLED)[0], "jobs").values()
    jobs = [job for job in entries if isinstance(job, Mapping)]
    seconds, usd = (total([number(job.get(unit)) for job in jobs]) for unit in ("seconds", "usd"))
    return seconds, usd


def total(values: Sequence[float | None]) -> float | None:
    """Returns the sum of the values; None if one of them is None, or if there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers and len(numbers) == len(values) else None


def after_warm_up(lines: Sequence[StatsLine]) -> list[StatsLine]:
    """Returns the lines that time steps, without the first line of each start."""
    return [line for line in lines if not line.warm_up and line.step_seconds is not None]


def _lines(entries: Iterable[StatsEntry], kind: str) -> tuple[StatsLine, ...]:
    of_kind = [entry for entry in entries if entry["kind"] == kind]
    return tuple(StatsLine(entry, index == 0) for index, entry in enumerate(of_kind))
