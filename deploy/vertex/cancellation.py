"""Cancels jobs, and the doubles of a job: those that a lost response created unnoticed."""

import functools
import sys
from collections.abc import Sequence

from deploy.vertex.api import LABEL, Backend, JobStatus
from deploy.vertex.retry import Clock, retried

WAIT_S = 900.0  # for the machines to shut down
POLL_S = 5.0


def cancel_and_wait(backend: Backend, name: str, clock: Clock) -> JobStatus:
    """Cancels the job and returns its status when it is over, or after WAIT_S."""
    retried(functools.partial(backend.cancel, name), clock)
    began = clock.now()
    while True:
        status = retried(functools.partial(backend.state, name), clock)
        if status.over or clock.now() - began > WAIT_S:
            return status
        clock.sleep(POLL_S)


def oldest_first(label: str, backend: Backend, clock: Clock) -> list[JobStatus]:
    """Returns the jobs with this label, oldest first: the first one counts, the others are doubles."""
    return _by_age(retried(functools.partial(backend.jobs, label), clock))


def cancel_doubles(jobs: Sequence[JobStatus], backend: Backend, clock: Clock) -> JobStatus | None:
    """Cancels all jobs of one submission but the oldest, which it returns; None without jobs."""
    found = _by_age(jobs)
    for double in found[1:]:
        if not double.over:
            retried(functools.partial(backend.cancel, double.name), clock)
            print(f"cancelled {double.name}: a double of {found[0].name}", file=sys.stderr, flush=True)
    return found[0] if found else None


def by_submission(jobs: Sequence[JobStatus]) -> list[list[JobStatus]]:
    """Returns the jobs in groups of one submission's attempt each."""
    groups: dict[str, list[JobStatus]] = {}
    for job in jobs:
        groups.setdefault(job.labels.get(LABEL, job.name), []).append(job)
    return list(groups.values())


def _by_age(jobs: Sequence[JobStatus]) -> list[JobStatus]:
    return sorted(jobs, key=lambda job: (job.created or 0.0, job.name))
