"""Ends persistent resources, which cost money until somebody deletes them, and finds those that nobody will end."""

import contextlib
import functools
from collections.abc import Sequence

from deploy.spec.spec_changes import GUARD_LABEL, RESOURCE_LABEL
from deploy.vertex.api import ApiError, Backend, JobStatus, unless_missing
from deploy.vertex.costs import describe_run, spent, usd_per_hour
from deploy.vertex.retry import Clock, retried

WAIT_S, POLL_S = 1800.0, 10.0  # for the deletion


def find_resource(backend: Backend, id: str, clock: Clock) -> JobStatus | None:
    """Returns the status of a persistent resource; None if it does not exist."""
    return unless_missing(lambda: retried(functools.partial(backend.resource, id), clock))


def check_deletion(backend: Backend, clock: Clock) -> None:
    """Raises ApiError unless this account may delete persistent resources; asks about a name that nothing has."""
    request_deletion(backend, "compare-none", clock)


def request_deletion(backend: Backend, id: str, clock: Clock) -> bool:
    """Requests deletion, and returns whether it was accepted; it may not be while the machines are provisioned."""
    try:
        retried(functools.partial(backend.delete_resource, id), clock)
    except ApiError as error:
        if error.code not in (400, 404, 409):
            raise
        return False
    return True


def delete_and_wait(backend: Backend, id: str, clock: Clock) -> JobStatus | None:
    """Deletes a persistent resource and returns its last status once it is gone; None if there was none.

    It may not be deleted while it is provisioned, so this is tried again. Raises ApiError if it is there after WAIT_S.
    """
    last, until = None, clock.now() + WAIT_S
    while status := find_resource(backend, id, clock):
        last = status
        if clock.now() >= until:
            raise ApiError(0, f"{id} is still {status.state}")
        if status.state != "STOPPING":
            request_deletion(backend, id, clock)
        clock.sleep(POLL_S)
    return last


def end_guards(backend: Backend, id: str, jobs: Sequence[JobStatus], clock: Clock) -> float:
    """Cancels the guards of a persistent resource that is gone, among `jobs`; returns the USD that they cost."""
    found = guards_of(id, jobs)
    for guard in found:
        if not guard.over:
            with contextlib.suppress(ApiError):  # it ends by itself: there is nothing left to guard
                retried(functools.partial(backend.cancel, guard.name), clock)
    return sum(spent(guard, clock.now()) for guard in found)


def guards_of(id: str, jobs: Sequence[JobStatus]) -> list[JobStatus]:
    """Returns the guards of a persistent resource among `jobs`."""
    return [job for job in jobs if job.labels.get(GUARD_LABEL) == id]


def is_left(id: str, jobs: Sequence[JobStatus]) -> bool:
    """Returns whether a persistent resource has neither a guard nor a job that is not over: nobody will end it."""
    with_it = [*guards_of(id, jobs), *(job for job in jobs if job.labels.get(RESOURCE_LABEL) == id)]
    return all(job.over for job in with_it)


def describe_left(status: JobStatus, jobs: Sequence[JobStatus], now: float) -> str:
    """Returns how long a persistent resource has run and what it costs, an hour too."""
    ran, cost = describe_run(status, now)
    price = usd_per_hour(status)
    hourly = "" if price is None else f", {price:.2f} USD an hour"
    guarded = any(not guard.over for guard in guards_of(status.display_name, jobs))
    guard = "" if guarded else ", without a guard"
    return f"{status.state}, ran for {ran}{cost and f', {cost}'}{hourly}{guard}: python -m deploy cancel {status.name}"
