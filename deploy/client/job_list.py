"""Lists the jobs that this package created in some regions, from any machine, and cancels duplicates among them."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TextIO

from deploy.client.arguments import add_flags, parser
from deploy.client.call_arguments import as_arguments
from deploy.client.documents import add_json_flag
from deploy.tiers.gcp_config import GcpConfig, needed_project, needed_region, read_project, read_region, regions_in
from deploy.tiers.output import printed_on
from deploy.tiers.spec_changes import LABEL
from deploy.vertex.api import STATES, JobStatus
from deploy.vertex.cancellation import cancel_duplicates
from deploy.vertex.errors import api_errors
from deploy.vertex.history import find_attempt
from deploy.vertex.job_end import with_reason
from deploy.vertex.retry import retried
from deploy.vertex.session import BACKENDS, SESSION, Session
from trainer.base.settings.fields import Parser, whole


def jobs_flags() -> Parser:
    """Returns the parser of `jobs`."""
    cli = parser("jobs", "Lists the jobs that this package submitted, region by region.", "[--region=NAME,NAME]")
    add_flags(cli, "project", "region", "backend")
    cli.add_argument("--state", type=str.upper, choices=STATES, default="", metavar="STATE", help="only those in this "
                     "state, as RUNNING")  # fmt: skip
    cli.add_argument("--limit", type=whole(1, 10_000), default=50, metavar="COUNT", help="the newest of each region "
                     "(default: %(default)s)")  # fmt: skip
    add_json_flag(cli)
    return cli


def jobs(
    region: str | Sequence[str] = "", project: str = "", state: str = "", limit: int = 50,
    stream: TextIO | None = None, session: Session = SESSION,
) -> list[JobStatus]:  # fmt: skip
    """Returns the `limit` newest jobs of each region, or those in one state, as "RUNNING", newest first.

    Also cancels duplicates, second jobs that a lost response created, and says so on `stream`.
    """
    with printed_on(stream):
        words = as_arguments((), {"region": region, "project": project, "state": state, "limit": limit})
        args = jobs_flags().parse_args(words)
        return [status for _, newest, _ in listed_jobs(args, session) for status in newest]


def listed_jobs(args: argparse.Namespace, session: Session) -> Iterator[tuple[str, list[JobStatus], int]]:
    """Yields each region with its jobs as `jobs` returns them, and how many there are in all."""
    project = needed_project(read_project(args.project) or _of_last_submission("project"))
    for region in map(needed_region, regions_in(args.region or read_region("") or _of_last_submission("region"))):
        with api_errors(GcpConfig(project, region, "")):
            backend = session.open(args.backend or BACKENDS[0], project, region)
            statuses = retried(backend.jobs, session.clock)
            groups: dict[str, list[JobStatus]] = {}  # of one submission's attempt each
            for status in statuses:
                groups.setdefault(status.labels.get(LABEL, status.name), []).append(status)
            for group in groups.values():
                cancel_duplicates(group, backend, session.clock)
        newest = sorted(statuses, key=lambda status: status.created or 0.0, reverse=True)
        newest = [status for status in newest if args.state in ("", status.state)][: args.limit]
        yield region, [*map(with_reason, newest)], len(statuses)


def _of_last_submission(name: str) -> str:
    """Returns the project or region of the last submission from this folder; empty without one."""
    with suppress(LookupError):
        return str(getattr(find_attempt("")[1], name))
    return ""
