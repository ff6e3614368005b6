"""Sends runs to trackers: a thread for each tracker follows the files of a running training and
never delays it.

stats.jsonl is the queue: what a tracker does not accept now is sent when it answers again, or by
`python -m deploy track`. Relies on `job_files.py` for the files and on `tracker.py` for the
interface. Each point is sent once.
"""

import dataclasses
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from threading import Event, Thread
from typing import Any

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.run_files.job_files import (
    MODEL,
    SAMPLE_FILES,
    Content,
    items,
    losses_and_metrics,
    mapping,
    number,
    read_result,
    read_run_info,
    read_stats,
)
from trainer.base.tracker import (
    Opened,
    Point,
    TrackedRun,
    Tracker,
    TrackerAddress,
    read_addresses,
    text_of,
)

# environment variable of a job: tags as JSON, which only the submitting machine knows
TAGS = "TRAINER_TAGS"
# The state in result.json -> the state in a tracker. A run that has ended in any other state was
# killed.
_STATES = {"done": "finished", "budget": "finished", "failed": "failed"}
# Values of result.json that no result/… shows: clock times, and what other points hold.
_NOT_RESULTS = ("final", "epoch_seconds", "steps", "history", "written_at", "job_began_at")
_NOT_VALUES = ("kind", "step", "time", "quality", "losses", "metrics")


@dataclass(frozen=True)
class RunFiles:
    """Reads the files of a run, which may grow, and shrink when the run goes back to a checkpoint.

    where: the path or address of the job directory, for people; more: values beside those of
        result.json.
    """

    folder: Path
    where: str
    name: str = ""
    parent: str = ""
    more: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def points(self, *, ended: bool) -> list[Point]:
        """Returns a point for each step; if the run has `ended`, the last one holds `result/…`.

        For a running one the newest step is left out, because more lines of it may follow. Means
        over an epoch are named `epoch/NAME`.
        """
        started = str(read_run_info(self.folder)[0].get("started", "1970-01-01T00:00:00Z"))
        time = datetime.fromisoformat(started).timestamp()  # of lines without a time of their own
        points = []
        for step, group in groupby(read_stats(self.folder)[0], lambda entry: entry["step"]):
            values: dict[str, float] = {}
            for entry in group:
                prefix = "epoch/" if entry["kind"] == "epoch" else ""
                values |= {f"{prefix}{name}": value for name, value in _numbers(entry)}
                time = number(entry.get("time")) or time
            points.append(Point(step, time, values))
        result = read_result(self.folder)[0]
        if not ended or result.get("state") not in ("done", "budget"):
            return points if ended else points[:-1]
        results = {name: value for name, value in result.items() if name not in _NOT_RESULTS}
        flat = {**dict(_flat("", results)), **dict(_numbers(mapping(result, "final")))}
        values = {f"result/{name}": value for name, value in flat.items()}
        return [*points, Point(result.get("steps", 0), time, {**values, **self.more})]

    def run(self, *, ended: bool) -> TrackedRun:
        """Returns the run without its points: settings, tags, state and files."""
        info = read_run_info(self.folder)[0]
        result = read_result(self.folder)[0]
        config = {key: text_of(value) for key, value in mapping(info, "config").items()}
        state = _STATES.get(str(result.get("state")), "killed") if ended else "running"
        grids = sorted(self.folder.glob(SAMPLE_FILES))[-1:] if ended else []
        job_dir = self.where.rstrip("/")
        identity = str(info.get("id") or digest([config, job_dir]))
        name = self.name or job_dir.rsplit("/", 1)[-1]
        facts = mapping(info, "data")
        data = {key: facts[key] for key in ("files", "content") if key in facts}
        # What only the job knows: its tier, its price, and its page.
        submitted = json.loads(os.environ.get(TAGS) or "{}")
        job = os.environ.get("CLOUD_ML_JOB_ID")
        page = "https://console.cloud.google.com/vertex-ai/locations/{region}/training/{job}?project={project}"
        versions = mapping(info, "versions").items()
        tags = {
            "commit": info.get("git_commit"),
            "data_fingerprint": digest(data) if data else "",
            "devices": ", ".join(map(str, items(info, "devices"))),
            "gpus": ", ".join(map(str, items(info, "gpus"))),
            "restarts": result.get("restarts", 0),
            "error": result.get("error"),
            "job_dir": job_dir,
            "model": f"{job_dir}/{MODEL}" if result.get("state") in ("done", "budget") else "",
            **{f"version.{package}": version for package, version in versions},
            **submitted,
            "job": page.format(**submitted, job=job) if submitted and job else "",
        }
        texts = {key: text_of(value) for key, value in tags.items() if value not in (None, "")}
        return TrackedRun(identity, name, self.folder, self.parent, config, texts, state, grids)


def digest(content: Any) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of `content`, which must be valid in JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _numbers(entry: Content) -> Iterator[tuple[str, float]]:
    """Yields names and values: losses and metrics by their own names, nested values by paths as
    `gpus/0/memory_gib`."""
    yield from _flat("", {name: value for name, value in entry.items() if name not in _NOT_VALUES})
    yield from losses_and_metrics(entry).items()


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if (valid := number(value)) is not None:
        yield name, valid
    elif isinstance(value, Mapping | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _flat(f"{name}/{key}" if name else str(key), inner)


_POLL_S = 1.0
_LONGEST_PAUSE_S = 60.0
_BEGINNING_S = 15.0  # how long a training waits for a tracker's first answer
# how long it waits for the rest to be sent: at its end; after a signal or failure
_ENDING_S = 60.0
_LEAVING_S = 3.0
_BATCH = 200  # points that one call sends
_SHARE = 0.01  # the largest share of a core's time for reading the files again
_BUILT_IN = {
    "mlflow": f"{__package__}.mlflow_runs:MlflowRuns",
    "wandb": f"{__package__}.wandb_runs:WandbRuns",
    "vertex": f"{__package__}.vertex_runs:VertexRuns",
}


def open_tracker(address: TrackerAddress) -> Tracker:
    """Imports and returns the tracker of an address.

    Raises UserError if its package or a login is missing.
    """
    name, _, function = _BUILT_IN.get(address.kind, address.kind).partition(":")
    advice = ""
    if address.kind in _BUILT_IN:
        advice = ": install the packages that docs/tracking.md lists for it"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        tracker: Tracker = getattr(importlib.import_module(name), function)(address)
        return tracker
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"track={address.text}: cannot import {address.kind} ({reason(error)}){advice}"
        ) from error


class Sender(Thread):
    """Sends one run to one tracker, each point once, after the last step that it has.

    As a thread it follows a training; `send` alone sends a run that has ended. `begun` is set after
    the first answer.
    """

    def __init__(self, address: TrackerAddress, source: RunFiles) -> None:
        super().__init__(name="tracking", daemon=True)
        self.text = f"track={address.text}"
        self._tracker = open_tracker(address)
        self._source = source
        self._steps: dict[str, int] = {}  # the last step that was read, by metric
        self.opened: Opened | None = None
        self.sent = 0  # points
        self.refusal: UserError | None = None
        self.outage = ""
        self.begun = Event()
        self._wake = Event()
        self._ended = False

    def send(self, *, ended: bool) -> None:
        """Sends the points that the tracker lacks; with `ended`, also how the run ended.

        Raises UserError if the tracker refuses the run. Any other exception is an outage, after
        which the next call opens the run anew.
        """
        try:
            if self.opened is None:
                self._steps = {}
                self.opened = self._tracker.begin(self._source.run(ended=False))
            unsent = []
            for point in self._source.points(ended=ended):
                new = {}
                for name, value in point.values.items():
                    last_step = max(self._steps.get(name, -1), self.opened.last_step(name))
                    if point.step > last_step:
                        new[name] = value
                if new:
                    unsent.append(point._replace(values=new))
                    self._steps.update(dict.fromkeys(new, point.step))
            # With the last batch also how the run ended, even if there is nothing else to send.
            for start in range(0, max(len(unsent), int(ended)), _BATCH):
                batch = unsent[start : start + _BATCH]
                is_last = start + _BATCH >= len(unsent)
                self._tracker.send(self._source.run(ended=ended and is_last), batch)
                self.sent += len(batch)
        except Exception:
            self.opened = None
            raise

    def run(self) -> None:
        """Sends new points until the run has ended or is refused; retries after an outage."""
        pause = _POLL_S
        over = False
        while not over:
            self._wake.clear()
            ended = self._ended
            began = time.thread_time()
            try:
                self.send(ended=ended)
                pause = max(_POLL_S, (time.thread_time() - began) / _SHARE)
                self.outage = ""
                over = ended
            except UserError as error:
                self.refusal = error
                over = True
            except Exception as error:
                if not self.outage:
                    log.warning(
                        f"{self.text}: {reason(error)}: training continues; metrics will be sent"
                        " later"
                    )
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                self.outage = reason(error)
            self.begun.set()
            if not over:
                self._wake.wait(_POLL_S if self._ended else pause)

    def end(self, seconds: float) -> None:
        """Waits up to `seconds` for the rest, and logs what was sent, or the command to send it."""
        self._ended = True
        self._wake.set()
        self.join(seconds)
        if self.opened and not self.is_alive():
            log.info(f"{self.text}: {self.sent:,} steps sent: {self.opened.link}")
            return
        why = self.refusal or self.outage or f"no answer within {seconds:g} seconds"
        command = f"python -m deploy track {self._source.where} --{self.text}"
        log.warning(f"{self.text}: not all is sent ({why}): send it with `{command}`")


@dataclass
class Tracking:
    """Sends a training to its trackers from `begin` to the end of the block."""

    addresses: Sequence[str]
    folder: Path
    where: str
    _senders: list[Sender] = dataclasses.field(default_factory=list)

    def begin(self) -> None:
        """Starts a thread for each tracker; run.json must be there.

        Raises UserError if a tracker refuses the run.
        """
        if self._senders:
            return  # the run has gone back to a checkpoint, which the senders see in its files
        source = RunFiles(self.folder, self.where)
        self._senders = [Sender(address, source) for address in read_addresses(self.addresses)]
        for sender in self._senders:
            sender.start()
        until = time.monotonic() + _BEGINNING_S
        for sender in self._senders:
            if not sender.begun.wait(max(0.0, until - time.monotonic())):
                log.warning(
                    f"{sender.text}: no answer within {_BEGINNING_S:g} seconds: the training begins"
                    " without it"
                )
            elif sender.refusal:
                self._senders.remove(sender)
                raise sender.refusal
            elif sender.opened:
                log.info(f"{sender.text}: {sender.opened.link}")

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        state = read_result(self.folder)[0].get("state")
        complete = state in ("done", "budget", "stopped") and not kind
        for sender in self._senders:
            sender.end(_ENDING_S if complete else _LEAVING_S)
