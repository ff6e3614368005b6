"""States and logs of a job until it ends. gcloud's own stream-logs does not end."""

import sys
from collections.abc import Callable
from datetime import datetime, timezone

from deploy.spec.gcp_config import GcpConfig
from deploy.vertex.api import ApiError, Backend, JobStatus, LogEntry, seconds
from deploy.vertex.costs import duration, price_of, spent
from deploy.vertex.errors import Lost, failure, meaning
from deploy.vertex.retry import Clock, retried

POLL_S = 10.0
LATE_S = 60.0  # how much later than its time an entry may appear in the logs
LAST_LOGS_S = 15.0  # after the end, for entries that are still on their way
LAST_RETRY_S = 300.0  # for the last reading of the logs

Say = Callable[[str], None]


class Tail:
    """The log of all workers, in the order of time, each entry once."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend, self._name = backend, name
        self._newest = 0.0
        self._seen: dict[str, float] = {}

    def new(self) -> list[LogEntry]:
        """What has come since the last call; ApiError where the logs cannot be read now."""
        since = _rfc3339(self._newest - LATE_S) if self._newest else ""
        entries = [entry for entry in self._backend.logs(self._name, since) if entry.id not in self._seen]
        for entry in entries:
            self._seen[entry.id] = seconds(entry.time) or 0.0
            self._newest = max(self._newest, self._seen[entry.id])
        self._seen = {key: time for key, time in self._seen.items() if time >= self._newest - 2 * LATE_S}
        return sorted(entries, key=lambda entry: (seconds(entry.time), entry.id))


def _rfc3339(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _print(line: str) -> None:
    print(line, flush=True)


def follow(backend: Backend, name: str, gcp: GcpConfig, clock: Clock, say: Say = _print) -> JobStatus:
    """Says states and logs until the job is over; Lost after half an hour without any answer, or a refused one."""
    tail, shown = Tail(backend, name), ""
    while True:
        status = _state(backend, name, gcp, clock)
        if status.over:
            clock.sleep(LAST_LOGS_S)
        _say_logs(tail, gcp, clock, LAST_RETRY_S if status.over else 0.0, say)
        if status.state != shown:
            shown = status.state
            say(f"{_time(clock.now())}  {shown}")
        if status.over:
            return status
        clock.sleep(POLL_S)


def _state(backend: Backend, name: str, gcp: GcpConfig, clock: Clock) -> JobStatus:
    try:
        return retried(lambda: backend.state(name), clock)
    except ApiError as error:
        if error.code == 404:  # there is no such job
            raise
        raise Lost(error.code, f"{meaning(error, gcp)}; the job may go on; {how_to_return(name)}") from None


def how_to_return(name: str) -> str:
    """What may be said to a job that nobody watches."""
    return f"come back: python -m deploy watch {name}; end it: python -m deploy cancel {name}"


def _say_logs(tail: Tail, gcp: GcpConfig, clock: Clock, retry_s: float, say: Say) -> None:
    """A log that cannot be read is no reason to stop watching: the next reading has its entries too."""
    try:
        for entry in retried(tail.new, clock, retry_s):
            severity = f"{entry.severity}: " if entry.severity in ("WARNING", "ERROR", "CRITICAL") else ""
            say(f"{_time(seconds(entry.time) or 0.0)}  {entry.worker}  {severity}{entry.text}")
    except ApiError as error:
        if retry_s or not error.transient:
            print(f"no logs: {meaning(error, gcp)}", file=sys.stderr)


def _time(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).strftime("%H:%M:%S")


def watch_job(backend: Backend, name: str, gcp: GcpConfig, clock: Clock) -> JobStatus | None:
    """`follow`, and how it ended, in words; None where Ctrl-C ended the watching and not the job."""
    try:
        status = follow(backend, name, gcp, clock)
    except KeyboardInterrupt:
        print(f"the job goes on; {how_to_return(name)}")
        return None
    ran, usd = spent(status, price_of(status), clock.now())
    money = "" if usd is None else f", about {usd:.2f} USD"
    print(f"{status.state} after {duration(ran)} on its machines{money}")
    if status.error:
        print(f"error: {failure(status)}", file=sys.stderr)
    return status
