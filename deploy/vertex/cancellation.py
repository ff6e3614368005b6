"""Cancels jobs, and the duplicates of a job: those that a lost response created unnoticed."""

from collections.abc import Sequence
from functools import partial

from deploy.tiers.output import tell
from deploy.vertex.api import JobStatus
from deploy.vertex.rest import Backend
from deploy.vertex.retry import Clock, retried

SHUTDOWN_WAIT_S = 900.0  # for the machines to shut down
CANCEL_POLL_S = 5.0


def cancel_and_wait(backend: Backend, name: str, clock: Clock) -> JobStatus:
    """Cancels the job and returns its status when it is over, or after SHUTDOWN_WAIT_S."""
    retried(partial(backend.cancel, name), clock)
    began = clock.now()
    while True:
        status = retried(partial(backend.state, name), clock)
        if status.over or clock.now() - began > SHUTDOWN_WAIT_S:
            return status
        clock.sleep(CANCEL_POLL_S)


def originals(jobs: Sequence[JobStatus]) -> dict[str, JobStatus]:
    """Returns, by the name of each job of one submission, oldest first, the job of which it is a duplicate, or itself.

    A job that was created while an older one was not over is its duplicate. One created later is none: somebody pasted
    the printed command again.
    """
    by_name: dict[str, JobStatus] = {}
    original = None
    for job in sorted(jobs, key=lambda job: (job.created or 0.0, job.name)):
        if original is None or (original.over and (job.created or 0.0) > (original.ended or 0.0)):
            original = job
        by_name[job.name] = original
    return by_name


def cancel_duplicates(jobs: Sequence[JobStatus], backend: Backend, clock: Clock) -> dict[str, JobStatus]:
    """Cancels the duplicates among the jobs of one submission, and returns `originals`."""
    by_name = originals(jobs)
    for job in jobs:
        if by_name[job.name].name != job.name and not job.over:
            cancel_duplicate(job, by_name[job.name].name, backend, clock)
    return by_name


def cancel_duplicate(job: JobStatus, original: str, backend: Backend, clock: Clock) -> None:
    """Cancels a job beside another one of the same submission."""
    retried(partial(backend.cancel, job.name), clock)
    tell(f"cancelled {job.name}: a duplicate of {original}")


def newest_original(jobs: Sequence[JobStatus], backend: Backend, clock: Clock) -> JobStatus | None:
    """Returns the newest job of one submission that is no duplicate, and cancels the others; None without jobs."""
    return next(reversed(cancel_duplicates(jobs, backend, clock).values()), None)
