"""`python -m deploy jobs`: the jobs that were submitted from here or elsewhere by this package, in one region."""

from collections.abc import Sequence
from datetime import datetime, timezone

from deploy.cli.arguments import add_flags, parser
from deploy.cli.target import add_backend
from deploy.spec.gcp_config import GcpConfig, needed_project, needed_region, read_project
from deploy.vertex.api import JobStatus
from deploy.vertex.costs import duration, price_of, spent
from deploy.vertex.errors import explained
from deploy.vertex.retry import retried
from deploy.vertex.session import SESSION, Session
from trainer.errors import DONE


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Prints a line a job, the newest first."""
    own = parser("jobs", "Lists the jobs that this package submitted, in one region.", "[--region=NAME]")
    add_flags(own, "project", "region")
    add_backend(own)
    asked = own.parse_args(arguments)
    gcp = GcpConfig(needed_project(read_project(asked.project)), needed_region(asked.region), "")
    with explained(gcp):
        backend = session.open(asked.backend, gcp.project, gcp.region)
        found = retried(backend.jobs, session.clock)
    for status in sorted(found, key=lambda status: status.created or 0.0, reverse=True):
        print(_line(status, session.clock.now()))
    if not found:
        print(f"no jobs of ours in {gcp.region}")
    return DONE


def _line(status: JobStatus, now: float) -> str:
    created = datetime.fromtimestamp(status.created or 0.0, timezone.utc).strftime("%Y-%m-%d %H:%M")
    ran, usd = spent(status, price_of(status), now)
    money = "" if usd is None else f"{usd:.2f} USD"
    return f"{created}  {status.state:10} {duration(ran):>9} {money:>10}  {status.display_name}  {status.name}"
