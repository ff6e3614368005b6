"""Lists the jobs in a region that this package created, from any machine.

`python -m deploy jobs` cancels doubles: jobs of one submission, of which a lost response created the second.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone

from deploy.cli.arguments import add_flags, parser
from deploy.cli.target import add_backend
from deploy.tiers.gcp_config import GcpConfig, checked_region, needed_project, needed_region, read_project, read_region
from deploy.vertex.api import STOPPED, JobStatus
from deploy.vertex.cancellation import by_submission, cancel_doubles
from deploy.vertex.errors import exit_on_api_error
from deploy.vertex.history import find_attempt
from deploy.vertex.job_end import settled
from deploy.vertex.live import LiveLines
from deploy.vertex.retry import retried
from deploy.vertex.session import SESSION, Session
from deploy.vertex.spending import describe_run
from trainer.base.errors import DONE, UserError


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Prints, for each region, one line for each job, newest first."""
    cli = parser("jobs", "Lists the jobs that this package submitted, region by region.", "[--regions=NAME,NAME]")
    add_flags(cli, "project", "region")
    cli.add_argument("--regions", default="", metavar="A,B", help="several regions, instead of --region")
    add_backend(cli)
    args = cli.parse_args(arguments)
    if args.region and args.regions:
        raise UserError("--region contradicts --regions: drop one of them")
    project = needed_project(read_project(args.project) or _of_last_submission("project"))
    if args.regions:
        regions = [checked_region(name) for name in args.regions.split(",")]
    else:
        regions = [needed_region(read_region(args.region) or _of_last_submission("region"))]
    for region in regions:
        _list_region(GcpConfig(project, region, ""), args.backend, session)
    return DONE


def _list_region(gcp: GcpConfig, backend_name: str, session: Session) -> None:
    with exit_on_api_error(gcp):
        backend = session.open(backend_name, gcp.project, gcp.region)
        found = retried(backend.jobs, session.clock)
        for jobs in by_submission(found):
            cancel_doubles(jobs, backend, session.clock)
        for status in sorted(found, key=lambda status: status.created or 0.0, reverse=True):
            status = settled(status, session.clock.now()) if status.limited else status
            print(_line(status, session.clock.now()) + (f": {status.error}" if status.state == STOPPED else ""))
            for line in LiveLines(status, session.clock).lines(status):
                print(f"  {line}")
    if not found:
        print(f"no jobs of this package in {gcp.region}")


def _of_last_submission(name: str) -> str:
    """Returns the project or region of the last submission from this folder; empty without one."""
    with suppress(LookupError):
        return str(getattr(find_attempt("")[1], name))
    return ""


def _line(status: JobStatus, now: float) -> str:
    created = datetime.fromtimestamp(status.created or 0.0, timezone.utc).strftime("%Y-%m-%d %H:%M")
    ran, cost = describe_run(status, now)
    return f"{created}  {status.state:10} {ran:>9} {cost:>10}  {status.display_name}  {status.name}"
