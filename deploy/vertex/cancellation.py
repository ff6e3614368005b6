"""Cancels jobs, and the doubles of a job: those that a lost response created unnoticed."""

import functools
import sys
from collections.abc import Sequence

from deploy.tiers.spec_changes import LABEL
from deploy.vertex.api import JobStatus
from deploy.vertex.rest import Backend
from deploy.vertex.retry import Clock, retried

SHUTDOWN_WAIT_S = 900.0  # for the machines to shut down
CANCEL_POLL_S = 5.0


def cancel_and_wait(backend: Backend, name: str, clock: Clock) -> JobStatus:
    """Cancels the job and returns its status when it is over, or after WAIT_S."""
    retried(functools.partial(backend.cancel, name), clock)
    began = clock.now()
    while True:
        status = retried(functools.partial(backend.state, name), clock)
        if status.over or clock.now() - began > SHUTDOWN_WAIT_S:
            return status
        clock.sleep(CANCEL_POLL_S)


def oldest_first(label: str, backend: Backend, clock: Clock) -> list[JobStatus]:
    """Returns the jobs with this label, oldest first."""
    return _by_age(retried(functools.partial(backend.jobs, label), clock))


def that_count(jobs: Sequence[JobStatus]) -> dict[str, JobStatus]:
    """Returns, by the name of each job of one submission, oldest first, the job that counts for it.

    A job that was created while an older one was not over is its double. One created later is none: somebody pasted
    the printed command again.
    """
    found: dict[str, JobStatus] = {}
    counts = None
    for job in _by_age(jobs):
        if counts is None or (counts.over and (job.created or 0.0) > (counts.ended or 0.0)):
            counts = job
        found[job.name] = counts
    return found


def cancel_doubles(jobs: Sequence[JobStatus], backend: Backend, clock: Clock) -> dict[str, JobStatus]:
    """Cancels the doubles among the jobs of one submission, and returns `that_count`."""
    found = that_count(jobs)
    for job in jobs:
        if found[job.name].name != job.name and not job.over:
            cancel_double(job, found[job.name], backend, clock)
    return found


def find_job(label: str, backend: Backend, clock: Clock) -> JobStatus | None:
    """Returns the newest job with this label that counts, and cancels its doubles; None if there is none."""
    return next(reversed(cancel_doubles(oldest_first(label, backend, clock), backend, clock).values()), None)


def cancel_double(job: JobStatus, counts: JobStatus, backend: Backend, clock: Clock) -> None:
    """Cancels a job beside the one that counts."""
    retried(functools.partial(backend.cancel, job.name), clock)
    print(f"cancelled {job.name}: a double of {counts.name}", file=sys.stderr, flush=True)


def by_submission(jobs: Sequence[JobStatus]) -> list[list[JobStatus]]:
    """Returns the jobs in groups of one submission's attempt each."""
    groups: dict[str, list[JobStatus]] = {}
    for job in jobs:
        groups.setdefault(job.labels.get(LABEL, job.name), []).append(job)
    return list(groups.values())


def _by_age(jobs: Sequence[JobStatus]) -> list[JobStatus]:
    return sorted(jobs, key=lambda job: (job.created or 0.0, job.name))
