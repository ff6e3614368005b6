"""Lists the jobs that this package created in some regions, from any machine, and cancels duplicates among them."""

from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

from deploy.tiers.gcp_config import GcpConfig, needed_project, needed_region, read_project, read_region, regions_in
from deploy.tiers.output import printed_on
from deploy.vertex.api import JobStatus
from deploy.vertex.cancellation import by_submission, cancel_duplicates
from deploy.vertex.errors import api_errors
from deploy.vertex.history import find_attempt
from deploy.vertex.job_end import settled
from deploy.vertex.retry import retried
from deploy.vertex.session import BACKENDS, SESSION, Session


def jobs(
    region: str = "", project: str = "", state: str = "", limit: int = 50, stream: TextIO | None = None,
    session: Session = SESSION,
) -> list[JobStatus]:  # fmt: skip
    """Returns the `limit` newest jobs of each region ("us-central1,us-east4"), newest first, or those in one state.

    Cancels duplicates: jobs of one submission, of which a lost response created the second; a line on `stream` says so.
    """
    with printed_on(stream):
        return [status for _, shown, _ in listed_jobs(region, project, state, limit, "", session) for status in shown]


def listed_jobs(
    region: str, project: str, state: str, limit: int, backend: str, session: Session
) -> Iterator[tuple[str, list[JobStatus], int]]:
    """Yields each region with its jobs as `jobs` returns them, and how many there are in all."""
    project = needed_project(read_project(project) or _of_last_submission("project"))
    named = regions_in(region or read_region("") or _of_last_submission("region"))
    for name in map(needed_region, named):
        gcp = GcpConfig(project, name, "")
        with api_errors(gcp):
            opened = session.open(backend or BACKENDS[0], project, name)
            found = retried(opened.jobs, session.clock)
            for group in by_submission(found):
                cancel_duplicates(group, opened, session.clock)
        newest = sorted(found, key=lambda status: status.created or 0.0, reverse=True)
        shown = [status for status in newest if state in ("", status.state)][:limit]
        now = session.clock.now()
        yield name, [settled(status, now) if status.limited else status for status in shown], len(found)


def _of_last_submission(name: str) -> str:
    """Returns the project or region of the last submission from this folder; empty without one."""
    with suppress(LookupError):
        return str(getattr(find_attempt("")[1], name))
    return ""
