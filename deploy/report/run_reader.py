"""A job directory, read: run.json, stats.jsonl and result.json of one run, as one frozen, typed Run.

Made for directories of any origin: a file that is missing or damaged costs the values it held, never the report.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.report.json_values import items, mapping, number, positive, read_json, whole


@dataclass(frozen=True)
class StatsLine:
    """One line of stats.jsonl: means over the steps since the line of its kind before."""

    step: int
    warm_up: bool  # the first of its kind, or the first after a restart
    step_seconds: float | None
    images_per_second: float | None
    scalars: Mapping[str, float]
    gpu_memory_gib: float | None  # of the fullest GPU


@dataclass(frozen=True)
class Run:
    """One job directory. None where the directory does not say; `problems` tells what was damaged."""

    folder: Path
    state: str  # done, interrupted, failed, running; missing or unknown where result.json is not there or is damaged
    error: str | None
    config: Mapping[str, Any]
    devices: tuple[str, ...]  # of each worker
    gpus: tuple[str, ...]  # what the chief's call themselves, as "NVIDIA L4"; none where TensorFlow does not say
    simulated: bool  # logical CPU devices stand for accelerators
    workers: int
    replicas: int | None
    global_batch_size: int | None
    rows_per_replica: int | None
    examples_per_step: int | None
    steps_per_epoch: int | None
    steps: int | None
    startup_seconds: float | None  # start of the process to the end of its first step
    wall_seconds: float | None  # of all processes
    restarts: int
    peak_memory_gib: float | None
    final: Mapping[str, float]  # losses and metrics, the newest of each
    started: str  # UTC; "" where run.json does not say
    command: str
    tensorflow: str  # its version
    reports: tuple[StatsLine, ...]
    epochs: tuple[StatsLine, ...]
    untold: str  # why stats.jsonl tells nothing; "" where it does
    problems: tuple[str, ...]

    @property
    def ending(self) -> str:
        """How the run ended, in words that follow a colon."""
        if self.state == "running":
            last = max((window.step for window in (*self.reports, *self.epochs)), default=None)
            return f"it has not ended, or was killed ({'no report' if last is None else f'last report: step {last:,}'})"
        told = {"missing": "there is no result.json", "unknown": "result.json is damaged"}
        because = f": {self.error}" if self.error else ""
        return told.get(self.state, f"the run ended as '{self.state}'{because}")

    @property
    def sample(self) -> Path | None:
        """The newest grid of generated images."""
        return max((self.folder / "samples").glob("step-*.png"), default=None)


def read_run(folder: Path) -> Run:
    """The job directory `folder`; whatever is missing or damaged in it is None."""
    about, about_problem = read_json(folder / "run.json")
    result, result_problem = read_json(folder / "result.json")
    entries, damaged = _entries(folder / "stats.jsonl")
    stats = "" if (folder / "stats.jsonl").is_file() else f"{folder / 'stats.jsonl'} is missing"
    if damaged:
        lines = "1 damaged line of stats.jsonl was" if damaged == 1 else f"{damaged} damaged lines of stats.jsonl were"
        stats = f"{folder}: {lines} left out"
    reports, epochs = _windows(entries, "report"), _windows(entries, "epoch")
    cluster, data, final = (mapping(about, "cluster"), mapping(about, "data"), mapping(result, "final"))
    config, steps = mapping(about, "config"), whole(result.get("steps"))
    return Run(
        folder=folder,
        state=str(result.get("state") or ("unknown" if (folder / "result.json").is_file() else "missing")),
        error=str(result["error"]) if result.get("error") else None,
        config=config,
        devices=tuple(map(str, items(about, "devices"))),
        gpus=tuple(map(str, filter(None, items(about, "gpus")))),
        simulated=about.get("simulated") is True,
        replicas=whole(cluster.get("replicas")),
        workers=whole(cluster.get("workers")) or 1,
        global_batch_size=whole(config.get("global_batch_size")),
        rows_per_replica=whole(cluster.get("rows_per_replica")),
        examples_per_step=whole(data.get("examples_per_step")),
        steps_per_epoch=whole(data.get("steps_per_epoch")),
        steps=max((window.step for window in (*reports, *epochs)), default=None) if steps is None else steps,
        startup_seconds=number(result.get("startup_seconds")),
        restarts=whole(result.get("restarts")) or 0,
        wall_seconds=number(result.get("wall_seconds")),
        peak_memory_gib=number(result.get("peak_memory_gib")),
        final=_scalars(final) if final else _newest(entries),
        started=str(about.get("started", "")),
        command=str(about.get("command", "")),
        tensorflow=str(mapping(about, "versions").get("tensorflow", "")),
        reports=reports,
        epochs=epochs,
        untold="" if reports or epochs else _untold(bool(stats), damaged),
        problems=tuple(problem for problem in (about_problem, result_problem, stats) if problem),
    )


def _untold(wrong: bool, damaged: int) -> str:
    if not wrong:
        return "stats.jsonl holds no report"
    return "stats.jsonl is damaged" if damaged else "stats.jsonl is missing"


def _entries(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that hold an object with a step, a kind and times, if any, that are numbers; how many do not."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [], 0
    found = [entry for line in lines if (entry := _entry(line)) is not None]
    return found, len(lines) - len(found)


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    sound = isinstance(entry, dict) and whole(entry.get("step")) is not None and isinstance(entry.get("kind"), str)
    times = ("step_seconds", "images_per_second")
    sound = sound and all(entry.get(name) is None or number(entry[name]) is not None for name in times)
    return entry if sound else None


def _windows(entries: Iterable[Mapping[str, Any]], kind: str) -> tuple[StatsLine, ...]:
    found = [entry for entry in entries if entry["kind"] == kind]
    return tuple(_window(entry, place == 0) for place, entry in enumerate(found))


def _window(entry: Mapping[str, Any], first: bool) -> StatsLine:
    gpus = [gpu for gpu in items(entry, "gpus") if isinstance(gpu, Mapping)]
    memory = [value for gpu in gpus if (value := number(gpu.get("memory_gib"))) is not None]
    return StatsLine(
        step=entry["step"],
        warm_up=first or bool(whole(entry.get("untimed_steps"))),
        step_seconds=positive(entry.get("step_seconds")),
        images_per_second=positive(entry.get("images_per_second")),
        scalars=_scalars(entry),
        gpu_memory_gib=max(memory, default=None),
    )


def _newest(entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The last value of every loss and metric, but for the means over an epoch."""
    return {name: value for entry in entries if entry["kind"] != "epoch" for name, value in _scalars(entry).items()}


def _scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    both = {**mapping(entry, "losses"), **mapping(entry, "metrics")}
    return {name: sound for name, value in both.items() if (sound := number(value)) is not None}
