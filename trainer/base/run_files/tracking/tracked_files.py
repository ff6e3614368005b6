"""Reads a job directory as trackers show it: the run with its settings, and a point for each step that it reported."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

from trainer.base.run_files.records import StatsEntry, items, mapping, number, parse_stats, read_result, read_run_info
from trainer.base.run_files.run_layout import MODEL, SAMPLE_FILES, STATS
from trainer.base.tracker import Point, TrackedRun, text_of

TAGS = "TRAINER_TAGS"  # a variable of a job: tags as JSON, which only whoever submits it knows
# The state in result.json -> that of a tracker. A run that neither runs nor says how it ended was killed.
_STATES = {"done": "finished", "budget": "finished", "failed": "failed"}
_NOT_VALUES = ("kind", "step", "time", "rollbacks", "quality", "first_step", "losses", "metrics")


class RunFiles:
    """Reads the files of a run, which may grow, and be replaced when the run goes back to a checkpoint.

    `where`: the path or address of the job directory, for people; `more`: values beside those of result.json.
    """

    def __init__(
        self, folder: Path, where: str, *, name: str = "", parent: str = "", more: Mapping[str, float] | None = None
    ) -> None:
        self._folder, self._where, self._parent, self._more = folder, where.rstrip("/"), parent, more or {}
        self._name = name or self._where.rsplit("/", 1)[-1]
        self._inode, self._offset, self._time = 0, 0, 0.0
        self._held: list[StatsEntry] = []  # lines of the newest step, to which others may be added

    def points(self, *, ended: bool, again: bool = False) -> list[Point]:
        """Returns the points since the last call, or all; once the run has `ended` also its last, and `result/…`."""
        file = self._folder / STATS
        self._inode = 0 if again else self._inode
        points = points_of(self._entries(file, ended=ended), self._time or self._began()) if file.is_file() else []
        self._time = points[-1].time if points else self._time
        result = read_result(self._folder)[0]
        if ended and result.get("state") in ("done", "budget"):
            numbers = {name: value for name, value in result.items() if name not in ("final", "epoch_seconds", "steps")}
            final = {f"result/{name}": value for name, value in _numbers(mapping(result, "final"))}
            points.append(
                Point(result.get("steps", 0), self._time, {**dict(_flat("result", numbers)), **final, **self._more})
            )
        return points

    def _entries(self, file: Path, *, ended: bool) -> list[StatsEntry]:
        with open(file, "rb") as opened:
            about = os.fstat(opened.fileno())
            if about.st_ino != self._inode or about.st_size < self._offset:
                self._inode, self._offset, self._held = about.st_ino, 0, []
            opened.seek(self._offset)
            content = opened.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        entries = [*self._held, *parse_stats(whole.decode(errors="replace"))]
        self._held = [] if ended else [entry for entry in entries if entry["step"] == entries[-1]["step"]]
        return entries[: len(entries) - len(self._held)]

    def run(self, *, ended: bool) -> TrackedRun:
        """Returns what a tracker shows of the run beside its points."""
        info, result = read_run_info(self._folder)[0], read_result(self._folder)[0]
        config = {key: text_of(value) for key, value in mapping(info, "config").items()}
        state = _STATES.get(str(result.get("state")), "killed") if ended else "running"
        grids = sorted(self._folder.glob(SAMPLE_FILES))[-1:] if ended else []
        identity = str(info.get("id") or digest([config, self._where]))
        tags = _tags(info, result, self._where)
        return TrackedRun(identity, self._name, self._folder, self._parent, config, tags, state, grids)

    def _began(self) -> float:
        started = str(read_run_info(self._folder)[0].get("started", "1970-01-01T00:00:00Z"))
        return datetime.strptime(started, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()


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
    """Returns what is known of a run beside its settings, without what is not."""
    data = {key: value for key, value in mapping(info, "data").items() if key in ("files", "content")}
    tags: dict[str, Any] = {
        "commit": info.get("git_commit"), "data_fingerprint": digest(data) if data else "",
        "devices": ", ".join(map(str, items(info, "devices"))), "gpus": ", ".join(map(str, items(info, "gpus"))),
        "rollbacks": result.get("rollbacks", 0), "restarts": result.get("restarts", 0), "error": result.get("error"),
        "job_dir": where, "model": f"{where}/{MODEL}" if result.get("state") in ("done", "budget") else "",
        **{f"version.{name}": version for name, version in mapping(info, "versions").items()}, **_of_job(),
    }  # fmt: skip
    return {name: text_of(value) for name, value in tags.items() if value not in (None, "")}


def _of_job(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the tags that `deploy submit` gave to this job, with the address of its page in Google's console."""
    tags: dict[str, Any] = json.loads(environment.get(TAGS) or "{}")
    job = environment.get("CLOUD_ML_JOB_ID")
    if tags and job:
        page = f"https://console.cloud.google.com/vertex-ai/locations/{tags['region']}/training/{job}"
        tags["job"] = f"{page}?project={tags['project']}"
    return tags
