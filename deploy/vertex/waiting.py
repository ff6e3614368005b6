"""States how long a job has waited for machines, and the likely reason."""

from collections.abc import Iterator

from deploy.vertex.api import JobStatus
from deploy.vertex.retry import Clock
from deploy.vertex.spending import format_duration

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
