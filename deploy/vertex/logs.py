"""Prints states and logs of a job until it ends, which gcloud's own stream-logs never does."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from datetime import UTC, datetime

from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.output import say, tell
from deploy.tiers.spec_changes import LABEL
from deploy.vertex.api import ApiError, JobStatus, LogEntry, parse_time
from deploy.vertex.cancellation import cancel_and_wait, cancel_duplicates
from deploy.vertex.errors import StateUnknownError, describe_error, describe_failure, exit_code
from deploy.vertex.job_end import settled
from deploy.vertex.job_progress import LiveLines, Waiting
from deploy.vertex.rest import Backend
from deploy.vertex.retry import RETRY_S, Clock, retried
from deploy.vertex.spending import describe_run, format_duration
from trainer.base.errors import FAULT, INTERRUPTED

LOG_POLL_S = 10.0
LATE_S = 60.0  # an entry may appear in the logs this long after its timestamp
LAST_LOGS_S = 15.0  # wait after the end for entries that have not arrived yet
LAST_RETRY_S = 30.0  # for the last read of the logs
LOOK_S = 60.0  # between looks for duplicates
UNSEEN_S = 300.0  # a job that was just created may be answered with 404 for this long


@dataclasses.dataclass(frozen=True)
class WatchLine:
    """Holds a line of a watch: what was seen of the job at `time`, or, with a `worker`, a line of its log."""

    time: float  # seconds since 1970
    text: str
    worker: str = ""
    severity: str = ""  # of the log's lines

    def __str__(self) -> str:
        severity = f"{self.severity}: " if self.severity in ("WARNING", "ERROR", "CRITICAL") else ""
        time = datetime.fromtimestamp(self.time, UTC).strftime("%H:%M:%S UTC")
        return f"{time}  {f'{self.worker}  ' * bool(self.severity)}{severity}{self.text}"


PrintLine = Callable[[WatchLine], object]


def show(line: WatchLine) -> None:
    """Prints a line for people."""
    say(str(line))


class LogTail:
    """Prints the log of all workers in chronological order, each entry once."""

    def __init__(self, backend: Backend, name: str, gcp: GcpConfig, clock: Clock, print_line: PrintLine) -> None:
        self._backend, self._name, self._gcp, self._clock, self._print = backend, name, gcp, clock, print_line
        self._newest = 0.0
        self._seen: dict[str, float] = {}
        self._refusal = ""  # the error that was printed last, so that it is printed once

    def print_new(self, retry_s: float = 0.0) -> None:
        """Prints new entries; errors do not end the watch, because the next read returns the same entries."""
        try:
            for entry in retried(self._read_new, self._clock, retry_s):
                self._print(WatchLine(parse_time(entry.time) or 0.0, entry.text, entry.worker, entry.severity))
            self._refusal = ""
        except ApiError as error:
            refusal = describe_error(error, self._gcp)
            if (retry_s or not error.transient) and refusal != self._refusal:
                self._refusal = refusal
                tell(f"no logs: {refusal}")

    def print_last(self) -> None:
        """Prints the entries that arrive after the end; Ctrl-C only skips them, as the job is over."""
        with contextlib.suppress(KeyboardInterrupt):
            self._clock.sleep(LAST_LOGS_S)
            self.print_new(LAST_RETRY_S)

    def _read_new(self) -> list[LogEntry]:
        """Returns the entries that arrived since the last call; ApiError if the logs cannot be read."""
        since = datetime.fromtimestamp(self._newest - LATE_S, UTC).isoformat(timespec="microseconds")
        after = since.replace("+00:00", "Z") if self._newest else ""
        entries = [entry for entry in self._backend.logs(self._name, after) if entry.id not in self._seen]
        for entry in entries:
            self._seen[entry.id] = parse_time(entry.time) or 0.0
            self._newest = max(self._newest, self._seen[entry.id])
        self._seen = {key: time for key, time in self._seen.items() if time >= self._newest - 2 * LATE_S}
        return sorted(entries, key=lambda entry: (parse_time(entry.time), entry.id))


def follow_job(
    backend: Backend, name: str, gcp: GcpConfig, clock: Clock, print_line: PrintLine = show,
    *, created: bool = False, max_wait_s: float = math.inf,
) -> JobStatus:  # fmt: skip
    """Prints states and logs until the job is over, and cancels its duplicates; returns the status of the original.

    StateUnknownError if the state cannot be read for half an hour. `created`: the job is known to exist, so that a 404
    only means that it cannot be seen yet. `max_wait_s`: a job that still waits for machines then is cancelled, EXPIRED.
    """
    tail, shown = LogTail(backend, name, gcp, clock, print_line), ""
    waiting = Waiting(clock, gcp.region, max_wait_s)
    live: LiveLines | None = None
    unseen, look_at = created, 0.0
    while True:
        status = _read_state(backend, name, gcp, clock, unseen=unseen)
        unseen = False
        if status.over or clock.now() >= look_at:  # also at the end: somebody else may have cancelled it as a duplicate
            look_at = clock.now() + LOOK_S
            label, by_name = status.labels.get(LABEL), dict[str, JobStatus]()
            with contextlib.suppress(ApiError):
                by_name = cancel_duplicates(backend.jobs(label) if label else [], backend, clock)
            original = by_name.get(status.name, status).name  # the job itself, if that is not known
            if original != status.name:
                print_line(WatchLine(clock.now(), f"follows {original}"))
                tail, name, live = LogTail(backend, original, gcp, clock, print_line), original, None
                continue
        live = live or LiveLines(status, clock)
        news = [] if status.state == shown else [status.state]
        shown = status.state
        for line in (*news, *waiting.lines(status), *live.lines(status)):
            print_line(WatchLine(clock.now(), line))
        if status.over:
            tail.print_last()
            return settled(status, clock.now())
        if waiting.too_long(status):  # EXPIRED, unless it ended otherwise meanwhile
            status = cancel_and_wait(backend, name, clock)
            if not status.over:
                raise StateUnknownError(0, f"{name} is still being cancelled; {watch_hint(name)}")
            error = f"no machines within --max_wait={format_duration(max_wait_s)}: cancelled"
            cancelled = status.state == "CANCELLED"
            return dataclasses.replace(status, state="EXPIRED", error=error) if cancelled else status
        tail.print_new()
        clock.sleep(LOG_POLL_S)


def _read_state(backend: Backend, name: str, gcp: GcpConfig, clock: Clock, *, unseen: bool) -> JobStatus:
    """Returns the job's status. `unseen`: it was just created, and may be answered with 404 for UNSEEN_S."""

    def read() -> JobStatus:
        try:
            return backend.state(name)
        except ApiError as error:
            raise ApiError(0, str(error)) if unseen and error.code == 404 else error from None

    try:
        return retried(read, clock, UNSEEN_S if unseen else RETRY_S)
    except ApiError as error:
        if unseen and error.transient and error.code:  # no 404: the service is away
            return _read_state(backend, name, gcp, clock, unseen=False)
        if error.code == 404:  # the job does not exist
            raise
        message = f"{describe_error(error, gcp)}; the job may still be running; {watch_hint(name)}"
        raise StateUnknownError(error.code, message) from None


def watch_hint(name: str) -> str:
    """Returns the commands for a job that is no longer watched."""
    return f"watch it: python -m deploy watch {name}; cancel it: python -m deploy cancel {name}"


def watch_job(
    backend: Backend, name: str, gcp: GcpConfig, clock: Clock, print_line: PrintLine = show,
    *, created: bool = False, max_wait_s: float = math.inf,
) -> JobStatus | None:  # fmt: skip
    """Follows the job and prints how it ended; returns None if Ctrl-C ended the watch but not the job."""
    try:
        status = follow_job(backend, name, gcp, clock, print_line, created=created, max_wait_s=max_wait_s)
    except KeyboardInterrupt:
        say(f"no longer watched, and not cancelled; {watch_hint(name)}")
        return None
    ran, cost = describe_run(status, clock.now())
    say(f"{status.state} after {ran} on its machines{cost and f', about {cost}'}")
    if status.error:
        tell(f"error: {describe_failure(status)}")
    if status.started and status.output and not status.checks and exit_code(status) in (INTERRUPTED, FAULT):
        say(f"to go on from its last checkpoint, if it saved one: the same command with --job_dir={status.output}")
    return status
