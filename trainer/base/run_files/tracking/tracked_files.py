"""Reads a job directory as trackers show it: the run with its settings, and a point for each step that it reported."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from trainer.base.run_files.records import StatsEntry, items, mapping, number, read_result, read_run_info, read_stats
from trainer.base.run_files.run_layout import MODEL, SAMPLE_FILES
from trainer.base.tracker import Point, TrackedRun, text_of

TAGS = "TRAINER_TAGS"  # a variable of a job: tags as JSON, which only whoever submits it knows
# The state in result.json -> that of a tracker. A run that neither runs nor says how it ended was killed.
_STATES = {"done": "finished", "budget": "finished", "failed": "failed"}
# Of result.json: times of the clock, and what points of their own hold.
_NOT_RESULTS = ("final", "epoch_seconds", "steps", "history", "written_at", "job_began_at")
_NOT_VALUES = ("kind", "step", "time", "rollbacks", "quality", "losses", "metrics")


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """Reads the files of a run, which may grow, and be replaced when the run goes back to a checkpoint.

    `where`: the path or address of the job directory, for people; `more`: values beside those of result.json.
    """

    folder: Path
    where: str
    name: str = ""
    parent: str = ""
    more: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def points(self, *, ended: bool) -> list[Point]:
        """Returns all points: of a run that goes on without the newest step, of which more may come.

        Of one that has `ended` the last one holds `result/…`.
        """
        started = str(read_run_info(self.folder)[0].get("started", "1970-01-01T00:00:00Z"))
        began = datetime.strptime(started, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
        points = points_of(read_stats(self.folder)[0], began)
        result = read_result(self.folder)[0]
        if not ended or result.get("state") not in ("done", "budget"):
            return points if ended else points[:-1]
        numbers = {name: value for name, value in result.items() if name not in _NOT_RESULTS}
        values = {**dict(_flat("", numbers)), **dict(_numbers(mapping(result, "final")))}
        named = {f"result/{name}": value for name, value in values.items()}
        time = points[-1].time if points else began
        return [*points, Point(result.get("steps", 0), time, {**named, **self.more})]

    def run(self, *, ended: bool) -> TrackedRun:
        """Returns the run without its points: settings, tags, state and files."""
        info, result = read_run_info(self.folder)[0], read_result(self.folder)[0]
        config = {key: text_of(value) for key, value in mapping(info, "config").items()}
        state = _STATES.get(str(result.get("state")), "killed") if ended else "running"
        grids = sorted(self.folder.glob(SAMPLE_FILES))[-1:] if ended else []
        where = self.where.rstrip("/")
        identity, name = str(info.get("id") or digest([config, where])), self.name or where.rsplit("/", 1)[-1]
        return TrackedRun(identity, name, self.folder, self.parent, config, _tags(info, result, where), state, grids)


def points_of(entries: Iterable[StatsEntry], time: float = 0.0) -> list[Point]:
    """Returns a point for each step; `time`, in seconds since 1970, is that of lines without one.

    Means over an epoch are named `epoch/NAME`. What follows a rollback is not what the run would have reported without
    one: its names end in @2, after the second rollback in @3.
    """
    points = []
    for (step, rollbacks), group in groupby(entries, lambda entry: (entry["step"], entry.get("rollbacks", 0))):
        values: dict[str, float] = {}
        for entry in group:
            before, after = "epoch/" if entry["kind"] == "epoch" else "", f"@{rollbacks + 1}" if rollbacks else ""
            values |= {f"{before}{name}{after}": value for name, value in _numbers(entry)}
            time = number(entry.get("time")) or time
        points.append(Point(step, time, values))
    return points


def digest(content: Any) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _numbers(entry: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields names and values: losses and metrics by their own names, what others hold as `gpus/0/memory_gib`."""
    yield from _flat("", {name: value for name, value in entry.items() if name not in _NOT_VALUES})
    yield from _flat("", {**mapping(entry, "losses"), **mapping(entry, "metrics")})


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if (valid := number(value)) is not None:
        yield name, valid
    elif isinstance(value, (Mapping, list)):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _flat(f"{name}/{key}" if name else str(key), inner)


def _tags(info: Mapping[str, Any], result: Mapping[str, Any], where: str) -> dict[str, str]:
    """Returns the tags of a run and of its job on Vertex AI; facts that are not known are left out."""
    data = {key: value for key, value in mapping(info, "data").items() if key in ("files", "content")}
    submitted, job = json.loads(os.environ.get(TAGS) or "{}"), os.environ.get("CLOUD_ML_JOB_ID")
    page = "https://console.cloud.google.com/vertex-ai/locations/{region}/training/{job}?project={project}"
    tags: dict[str, Any] = {
        "commit": info.get("git_commit"), "data_fingerprint": digest(data) if data else "",
        "devices": ", ".join(map(str, items(info, "devices"))), "gpus": ", ".join(map(str, items(info, "gpus"))),
        "rollbacks": result.get("rollbacks", 0), "restarts": result.get("restarts", 0), "error": result.get("error"),
        "job_dir": where, "model": f"{where}/{MODEL}" if result.get("state") in ("done", "budget") else "",
        **{f"version.{name}": version for name, version in mapping(info, "versions").items()}, **submitted,
        "job": page.format(**submitted, job=job) if submitted and job else "",
    }  # fmt: skip
    return {name: text_of(value) for name, value in tags.items() if value not in (None, "")}
