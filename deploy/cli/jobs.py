"""Lists the jobs in one region that this package submitted, from any machine: `python -m deploy jobs`.

Cancels doubles: jobs of one submission, of which a lost response created the second.
"""

from collections.abc import Sequence
from datetime import datetime, timezone

from deploy.cli.arguments import add_flags, parser
from deploy.cli.target import add_backend
from deploy.spec.gcp_config import GcpConfig, needed_project, needed_region, read_project
from deploy.vertex.api import JobStatus
from deploy.vertex.cancellation import by_submission, cancel_doubles
from deploy.vertex.costs import describe_run
from deploy.vertex.errors import exit_on_api_error
from deploy.vertex.live import LiveLines
from deploy.vertex.retry import retried
from deploy.vertex.session import SESSION, Session
from trainer.errors import DONE


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Prints one line for each job, newest first."""
    cli = parser("jobs", "Lists the jobs that this package submitted, in one region.", "[--region=NAME]")
    add_flags(cli, "project", "region")
    add_backend(cli)
    args = cli.parse_args(arguments)
    gcp = GcpConfig(needed_project(read_project(args.project)), needed_region(args.region), "")
    with exit_on_api_error(gcp):
        backend = session.open(args.backend, gcp.project, gcp.region)
        found = retried(backend.jobs, session.clock)
        for jobs in by_submission(found):
            cancel_doubles(jobs, backend, session.clock)
    for status in sorted(found, key=lambda status: status.created or 0.0, reverse=True):
        print(_line(status, session.clock.now()))
        for line in LiveLines(status, session.clock).lines(status):
            print(f"  {line}")
    if not found:
        print(f"no jobs of this package in {gcp.region}")
    return DONE


def _line(status: JobStatus, now: float) -> str:
    created = datetime.fromtimestamp(status.created or 0.0, timezone.utc).strftime("%Y-%m-%d %H:%M")
    ran, cost = describe_run(status, now)
    return f"{created}  {status.state:10} {ran:>9} {cost:>10}  {status.display_name}  {status.name}"
