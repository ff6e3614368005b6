"""Prints states and logs of a job until it ends, which gcloud's own stream-logs never does."""

import sys
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial

from deploy.spec.gcp_config import GcpConfig
from deploy.vertex.api import ApiError, Backend, JobStatus, LogEntry, parse_time
from deploy.vertex.costs import describe_run
from deploy.vertex.errors import StateUnknownError, describe_error, describe_failure
from deploy.vertex.retry import Clock, retried

POLL_S = 10.0
LATE_S = 60.0  # an entry may appear in the logs this long after its timestamp
LAST_LOGS_S = 15.0  # wait after the end for entries that have not arrived yet
LAST_RETRY_S = 300.0  # for the last read of the logs

PrintLine = Callable[[str], None]
_PRINT: PrintLine = partial(print, flush=True)


class LogTail:
    """Reads the log of all workers in chronological order, each entry once."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend, self._name = backend, name
        self._newest = 0.0
        self._seen: dict[str, float] = {}

    def read_new(self) -> list[LogEntry]:
        """Returns the entries that arrived since the last call; ApiError if the logs cannot be read."""
        since = _rfc3339(self._newest - LATE_S) if self._newest else ""
        entries = [entry for entry in self._backend.logs(self._name, since) if entry.id not in self._seen]
        for entry in entries:
            self._seen[entry.id] = parse_time(entry.time) or 0.0
            self._newest = max(self._newest, self._seen[entry.id])
        self._seen = {key: time for key, time in self._seen.items() if time >= self._newest - 2 * LATE_S}
        return sorted(entries, key=lambda entry: (parse_time(entry.time), entry.id))


def _rfc3339(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def follow_job(backend: Backend, name: str, gcp: GcpConfig, clock: Clock, print_line: PrintLine = _PRINT) -> JobStatus:
    """Prints states and logs until the job is over; StateUnknownError if its state cannot be read for half an hour."""
    tail, shown = LogTail(backend, name), ""
    while True:
        status = _read_state(backend, name, gcp, clock)
        if status.over:
            clock.sleep(LAST_LOGS_S)
        _print_logs(tail, gcp, clock, LAST_RETRY_S if status.over else 0.0, print_line)
        if status.state != shown:
            shown = status.state
            print_line(f"{_time(clock.now())}  {shown}")
        if status.over:
            return status
        clock.sleep(POLL_S)


def _read_state(backend: Backend, name: str, gcp: GcpConfig, clock: Clock) -> JobStatus:
    try:
        return retried(lambda: backend.state(name), clock)
    except ApiError as error:
        if error.code == 404:  # the job does not exist
            raise
        message = f"{describe_error(error, gcp)}; the job may still be running; {watch_hint(name)}"
        raise StateUnknownError(error.code, message) from None


def watch_hint(name: str) -> str:
    """Returns the commands for a job that is no longer watched."""
    return f"watch it: python -m deploy watch {name}; cancel it: python -m deploy cancel {name}"


def _print_logs(tail: LogTail, gcp: GcpConfig, clock: Clock, retry_s: float, print_line: PrintLine) -> None:
    """Prints new entries; errors do not end the watch, because the next read returns the same entries."""
    try:
        for entry in retried(tail.read_new, clock, retry_s):
            severity = f"{entry.severity}: " if entry.severity in ("WARNING", "ERROR", "CRITICAL") else ""
            print_line(f"{_time(parse_time(entry.time) or 0.0)}  {entry.worker}  {severity}{entry.text}")
    except ApiError as error:
        if retry_s or not error.transient:
            print(f"no logs: {describe_error(error, gcp)}", file=sys.stderr)


def _time(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).strftime("%H:%M:%S")


def watch_job(backend: Backend, name: str, gcp: GcpConfig, clock: Clock) -> JobStatus | None:
    """Follows the job and prints how it ended; returns None if Ctrl-C ended the watch but not the job."""
    try:
        status = follow_job(backend, name, gcp, clock)
    except KeyboardInterrupt:
        print(f"the job is still running; {watch_hint(name)}")
        return None
    ran, cost = describe_run(status, clock.now())
    print(f"{status.state} after {ran} on its machines{cost and f', about {cost}'}")
    if status.error:
        print(f"error: {describe_failure(status)}", file=sys.stderr)
    return status
