"""States how long a job has waited for machines, and how far a running one is, by its files in the bucket."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence

from deploy.vertex import buckets
from deploy.vertex.api import JobStatus
from deploy.vertex.retry import Clock
from deploy.vertex.spending import format_duration, time_and_cost, usd_per_hour
from trainer.base.errors import PlatformFault, UserError, reason
from trainer.base.run_files.records import RUN_INFO, STATS, StatsEntry, mapping, number, parse_stats, positive, whole
from trainer.base.storage import Address, parse
from trainer.base.storage.gcs import connect

LIVE_S = 60.0  # between looks of a watch
RECENT = 10  # reports from which the speed is computed


class LiveLines:
    """Makes the lines of a watch: progress and money every LIVE_S, if they changed, and each problem once.

    Reads the job directory again only where it has changed.
    """

    def __init__(self, status: JobStatus, clock: Clock) -> None:
        self._clock, self._due = clock, 0.0
        self._generation = 0  # of stats.jsonl, which `_live` sums up
        self._live = ""
        self._shown = set[str]()
        self._folder: Address | None = None
        with contextlib.suppress(UserError):  # of a job that somebody else created
            self._folder = parse(status.output, "output")

    def lines(self, status: JobStatus) -> Iterator[str]:
        """Yields the lines that are due, and the link of an interactive shell as soon as there is one."""
        news = {line: line for line in (f"a shell in {worker}: {uri}" for worker, uri in status.shells.items())}
        if status.state == "RUNNING" and self._clock.now() >= self._due:
            self._due = self._clock.now() + LIVE_S
            news |= self._progress(status)
        for subject, line in news.items():
            if subject not in self._shown:
                self._shown.add(subject)
                yield line

    def _progress(self, status: JobStatus) -> dict[str, str]:
        """Returns how far the run is, with the money, and what is wrong; each by what makes it new."""
        try:
            self._read()
        except (UserError, PlatformFault, ValueError, AttributeError) as error:  # the latter two of a damaged file
            return {str(error): f"no progress: {reason(error)} ({self._folder})"}
        price = usd_per_hour(status)
        usd = time_and_cost(status, price, self._clock.now())[1]
        money = "" if price is None else f"; {usd:.2f} USD so far, {price * status.timeout_s / 3600:.2f} at most"
        return {self._live: f"{self._live}{money}"} if self._live else {}

    def _read(self) -> None:
        stats = connect(buckets.QUICK).get(self._folder / STATS) if self._folder else None
        if stats and stats.generation != self._generation:
            about = json.loads(buckets.read(f"{self._folder}/{RUN_INFO}", quick=True)[0] or "{}")
            entries = parse_stats(connect(buckets.QUICK).read(stats).decode(errors="replace"))
            self._live, self._generation = summary(entries, whole(about.get("total_steps")) or 0), stats.generation


def summary(entries: Sequence[StatsEntry], total_steps: int) -> str:
    """Returns how far the run of these lines of stats.jsonl is, in words; "" without a report."""
    reports = [entry for entry in entries if entry["kind"] == "report" and number(entry.get("seconds")) is not None]
    if not reports:
        return ""
    first, last, step = reports[-RECENT:][0], reports[-1], entries[-1]["step"]
    # With evaluations and checkpoints between these reports.
    steps, seconds = last["step"] - first["step"], last["seconds"] - first["seconds"]
    pace = seconds / steps if steps > 0 and seconds > 0 else positive(last.get("step_seconds"))
    left = max(0, total_steps - step) * pace if pace and total_steps else None
    losses = ((name, number(value)) for name, value in mapping(last, "losses").items())
    loss = ", ".join(f"{name} {value:.4g}" for name, value in itertools.islice(losses, 2) if value is not None)
    share = f" of {total_steps:,} ({step / total_steps:.0%})" if total_steps else ""
    rest = "" if left is None else f"{format_duration(left)} left"
    return ", ".join(filter(None, [f"step {step:,}{share}", rest, loss]))


REPORT_S = 300.0  # between lines of a job that waits

# By scheduling strategy, of a job that is PENDING.
_REASONS = {
    "FLEX_START": "FLEX_START waits until the machines are free, for the tier's maxWaitDuration at most",
    "SPOT": "there may be no spare machines in {region} now",
}
_STOCK = "after some minutes the likely reason is that {region} has no such machines free now"
_QUOTA = "waits for quota in {region}, which other jobs use: `python -m deploy jobs` lists yours"
_ADVICE = "; `submit TIER TIER --region=A,B --max_wait=1h` tries others by itself"


class Waiting:
    """Measures how long a job waits in QUEUED or PENDING; `max_wait_s` counts from the first look."""

    def __init__(self, clock: Clock, region: str, max_wait_s: float) -> None:
        self._clock, self._region, self._max_wait_s = clock, region, max_wait_s
        self._began, self._due = clock.now(), clock.now() + REPORT_S

    def lines(self, status: JobStatus) -> Iterator[str]:
        """Yields a line every REPORT_S while the job waits."""
        now = self._clock.now()
        if _waits(status) and now >= self._due:
            self._due = now + REPORT_S
            waited = format_duration(max(0.0, now - min(self._began, status.created or self._began)))
            reason = _QUOTA if status.state == "QUEUED" else _REASONS.get(status.strategy, _STOCK)
            advice = "" if self._max_wait_s < float("inf") else _ADVICE
            yield f"{status.state} for {waited}: {reason.format(region=self._region)}{advice}"

    def too_long(self, status: JobStatus) -> bool:
        """Returns whether the job has waited for its longest time, by this machine's clock alone."""
        return _waits(status) and self._clock.now() - self._began >= self._max_wait_s


def _waits(status: JobStatus) -> bool:
    return status.state in ("QUEUED", "PENDING") and not status.started
