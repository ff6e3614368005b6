"""Lists the jobs in a region that this package created, from any machine.

`python -m deploy jobs` cancels duplicates: jobs of one submission, of which a lost response created the second.
"""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone

from deploy.cli.arguments import add_flags, parser
from deploy.tiers.gcp_config import GcpConfig, needed_project, needed_region, read_project, read_region, regions_in
from deploy.vertex.api import STATES, STOPPED, JobStatus
from deploy.vertex.cancellation import by_submission, cancel_duplicates
from deploy.vertex.errors import exit_on_api_error
from deploy.vertex.history import find_attempt
from deploy.vertex.job_end import settled
from deploy.vertex.live import LiveLines
from deploy.vertex.retry import retried
from deploy.vertex.session import SESSION, Session
from deploy.vertex.spending import describe_run
from trainer.base.errors import DONE
from trainer.base.settings.flags import whole

HEADER = "created (UTC)     state      time         cost  name  job"


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Prints, for each region, one line for each job, newest first."""
    cli = parser("jobs", "Lists the jobs that this package submitted, region by region.", "[--region=NAME,NAME]")
    add_flags(cli, "project", "region", "backend")
    cli.add_argument("--state", type=str.upper, choices=STATES, default="", metavar="STATE", help="only those in this "
                     "state, as RUNNING")  # fmt: skip
    cli.add_argument("--limit", type=whole(1, 10_000), default=50, metavar="COUNT", help="the newest of each region "
                     "(default: %(default)s)")  # fmt: skip
    args = cli.parse_args(arguments)
    project = needed_project(read_project(args.project) or _of_last_submission("project"))
    named = regions_in(args.region or read_region("") or _of_last_submission("region"))
    for region in map(needed_region, named):
        _list_region(GcpConfig(project, region, ""), args, session)
    return DONE


def _list_region(gcp: GcpConfig, args: argparse.Namespace, session: Session) -> None:
    with exit_on_api_error(gcp):
        backend = session.open(args.backend, gcp.project, gcp.region)
        found = retried(backend.jobs, session.clock)
        for jobs in by_submission(found):
            cancel_duplicates(jobs, backend, session.clock)
        newest = sorted(found, key=lambda status: status.created or 0.0, reverse=True)
        shown = [status for status in newest if args.state in ("", status.state)][: args.limit]
        print(HEADER if shown else f"no {args.state}{' ' * bool(args.state)}jobs of this package in {gcp.region}")
        for status in shown:
            status = settled(status, session.clock.now()) if status.limited else status
            print(_line(status, session.clock.now()) + (f": {status.error}" if status.state == STOPPED else ""))
            for line in LiveLines(status, session.clock).lines(status):
                print(f"  {line}")
        if len(shown) == args.limit < len(found):
            print(f"the newest {args.limit} of {len(found)}: --limit= shows more, --state= those in one state")


def _of_last_submission(name: str) -> str:
    """Returns the project or region of the last submission from this folder; empty without one."""
    with suppress(LookupError):
        return str(getattr(find_attempt("")[1], name))
    return ""


def _line(status: JobStatus, now: float) -> str:
    created = datetime.fromtimestamp(status.created or 0.0, timezone.utc).strftime("%Y-%m-%d %H:%M")
    ran, cost = describe_run(status, now)
    return f"{created}  {status.state:10} {ran:>9} {cost:>10}  {status.display_name}  {status.name}"
