"""Reads run.json, stats.jsonl and result.json of a job directory into one typed Run.

Missing or damaged files cost only the values that they contained: they never make the report fail.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.reporting.breakdown import KINDS, tried_by
from trainer.reporting.run_files import (
    Result,
    StatsEntry,
    items,
    mapping,
    number,
    positive,
    read_result,
    read_run_info,
    read_stats,
    whole,
)
from trainer.storage.run_layout import RESULT, SAMPLE_FILES, STATS


@dataclass(frozen=True)
class StatsLine:
    """Holds one line of stats.jsonl: means over the steps since the previous line of its kind."""

    step: int
    warm_up: bool  # the first of its kind, or the first after a restart
    step_seconds: float | None
    images_per_second: float | None
    input_wait: float | None  # share of step_seconds that was lost waiting for the batch
    scalars: Mapping[str, float]
    gpu_memory_gib: float | None  # of the GPU that uses most


@dataclass(frozen=True)
class Run:
    """Holds what one job directory contains. Unknown values are None; `problems` names damaged files."""

    folder: Path
    state: str  # done, interrupted, failed, running; missing or unknown if result.json is missing or damaged
    error: str | None
    config: Mapping[str, Any]
    devices: tuple[str, ...]  # of each worker
    gpus: tuple[str, ...]  # models of the chief's GPUs, as "NVIDIA L4"; empty if TensorFlow does not report them
    simulated: bool  # logical CPU devices stand for accelerators
    workers: int
    replicas: int | None
    global_batch_size: int | None
    rows_per_replica: int | None
    examples_per_step: int | None
    steps_per_epoch: int | None
    unit: str  # what is counted: images, examples, or the steps of a script that counts no examples
    steps: int | None
    startup_seconds: float | None  # from the start of the process to the end of its first step
    wall_seconds: float | None  # of all processes; None if result.json does not count all of them
    uncounted: bool  # result.json was removed while the run had begun, so that it counts its later processes only
    restarts: int
    peak_memory_gib: float | None
    peak_device_gib: float | None  # as TensorFlow counts it, of the fullest device
    predicted: Mapping[str, float]  # by the plan of the job, as trainer.reporting.plan_file.predicted; {} without one
    profile: Mapping[str, float]  # share of each kind in the profiled steps; empty without --profile_steps
    tried: tuple[str, ...]  # remedies for slow steps that it uses, or has found to be slower
    final: Mapping[str, float]  # the newest value of each loss and metric
    quality: str  # what measures of images must have in common to be compared; "" without such
    started: str  # UTC; "" if unknown
    command: str
    tensorflow: str  # version
    reports: tuple[StatsLine, ...]
    epochs: tuple[StatsLine, ...]
    no_stats: str  # why stats.jsonl contains no report; "" if it does
    problems: tuple[str, ...]

    @property
    def ending(self) -> str:
        """Returns how the run ended, as text that follows a colon."""
        if self.state == "running":
            last = max((line.step for line in (*self.reports, *self.epochs)), default=None)
            return f"it has not ended, or was killed ({'no report' if last is None else f'last report: step {last:,}'})"
        if self.state in ("missing", "unknown"):
            return f"{RESULT} is {'missing' if self.state == 'missing' else 'damaged'}"
        return f"the run ended as '{self.state}'{f': {self.error}' if self.error else ''}"

    @property
    def sample(self) -> Path | None:
        """Returns the newest grid of generated images."""
        return max(self.folder.glob(SAMPLE_FILES), default=None)


def read_run(folder: Path) -> Run:
    """Reads the job directory `folder`; missing and damaged values become None."""
    info, info_problem = read_run_info(folder)
    result, result_problem = read_result(folder)
    entries, stats_problem = read_stats(folder)
    reports, epochs = _lines(entries, "report"), _lines(entries, "epoch")
    cluster, data, final = mapping(info, "cluster"), mapping(info, "data"), mapping(result, "final")
    config, steps = mapping(info, "config"), whole(result.get("steps"))
    uncounted = _uncounted(result, entries)
    no_report = "is damaged" if (folder / STATS).is_file() else "is missing"
    return Run(
        folder=folder,
        state=str(result.get("state") or ("unknown" if (folder / RESULT).is_file() else "missing")),
        error=str(result["error"]) if result.get("error") else None,
        config=config,
        devices=tuple(map(str, items(info, "devices"))),
        gpus=tuple(map(str, filter(None, items(info, "gpus")))),
        simulated=info.get("simulated") is True,
        replicas=whole(cluster.get("replicas")),
        workers=whole(cluster.get("workers")) or 1,
        global_batch_size=whole(config.get("global_batch_size")),
        rows_per_replica=whole(cluster.get("rows_per_replica")),
        examples_per_step=whole(data.get("examples_per_step")),
        steps_per_epoch=whole(data.get("steps_per_epoch")),
        unit=next((unit for unit in ("examples", "steps") if data.get("unit") == unit), "images"),
        steps=max((line.step for line in (*reports, *epochs)), default=None) if steps is None else steps,
        startup_seconds=number(result.get("startup_seconds")),
        restarts=whole(result.get("restarts")) or 0,
        wall_seconds=None if uncounted else number(result.get("wall_seconds")),
        uncounted=uncounted,
        peak_memory_gib=number(result.get("peak_memory_gib")),
        peak_device_gib=max(filter(None, map(number, items(result, "peak_device_memory_gib"))), default=None),
        predicted={
            key: each for key, value in mapping(result, "predicted").items() if (each := number(value)) is not None
        },
        profile=_shares(mapping(mapping(result, "profile"), "shares")),
        tried=tuple(tried_by(config, mapping(info, "compilation"))),
        final=_scalars(final) if final else _newest(entries),
        quality=_quality(mapping(final, "quality")),
        started=str(info.get("started", "")),
        command=str(info.get("command", "")),
        tensorflow=str(mapping(info, "versions").get("tensorflow", "")),
        reports=reports,
        epochs=epochs,
        no_stats="" if reports or epochs else f"{STATS} {no_report if stats_problem else 'contains no report'}",
        problems=tuple(filter(None, (info_problem, result_problem, stats_problem))),
    )


def _uncounted(result: Result, entries: Sequence[StatsEntry]) -> bool:
    """Returns whether result.json lacks the time of processes that stats.jsonl has lines of.

    `seconds` in stats.jsonl counts all processes, from the first step on. Each process needs its start besides; a run
    that was done and then lengthened has more starts than restarts too, but all of them in its time.
    """
    wall, startup = number(result.get("wall_seconds")), number(result.get("startup_seconds")) or 0.0
    trained = max((number(entry.get("seconds")) or 0.0 for entry in entries), default=0.0)
    reports = [entry for entry in entries if entry["kind"] == "report"]
    restarts = sum(1 for entry in reports[1:] if whole(entry.get("untimed_steps")))
    unknown = restarts > (whole(result.get("restarts")) or 0)
    return wall is not None and unknown and wall < trained + 1.5 * startup


def _lines(entries: Iterable[StatsEntry], kind: str) -> tuple[StatsLine, ...]:
    found = [entry for entry in entries if entry["kind"] == kind]
    return tuple(_line(entry, index == 0) for index, entry in enumerate(found))


def _line(entry: StatsEntry, first: bool) -> StatsLine:
    gpus = [gpu for gpu in items(entry, "gpus") if isinstance(gpu, Mapping)]
    memory = [value for gpu in gpus if (value := number(gpu.get("memory_gib"))) is not None]
    seconds, waited = positive(entry.get("step_seconds")), number(entry.get("input_wait_seconds"))
    return StatsLine(
        step=entry["step"],
        warm_up=first or bool(whole(entry.get("untimed_steps"))),
        step_seconds=seconds,
        images_per_second=positive(entry.get("images_per_second")),
        input_wait=min(1.0, max(0.0, waited / seconds)) if seconds and waited is not None else None,
        scalars=_scalars(entry),
        gpu_memory_gib=max(memory, default=None),
    )


def _shares(found: Mapping[str, Any]) -> dict[str, float]:
    """Returns the share of every kind; {} if one is missing or damaged."""
    shares = {kind: share for kind in KINDS if (share := number(found.get(kind))) is not None and 0 <= share <= 1}
    return shares if len(shares) == len(KINDS) else {}


def _newest(entries: Iterable[StatsEntry]) -> dict[str, float]:
    """Returns the last value of every loss and metric; means over an epoch do not count."""
    return {name: value for entry in entries if entry["kind"] != "epoch" for name, value in _scalars(entry).items()}


def _quality(about: Mapping[str, Any]) -> str:
    parts = {"features": "features_sha256", "images": "samples", "formulas": "formulas"}
    return ", ".join(f"{name} {about.get(key)}" for name, key in parts.items()) if about else ""


def _scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    values = {**mapping(entry, "losses"), **mapping(entry, "metrics")}
    return {name: valid for name, value in values.items() if (valid := number(value)) is not None}
