"""Lists the jobs in a region that this package created, from any machine: `python -m deploy jobs`."""

from collections.abc import Sequence
from datetime import datetime, timezone

from deploy.client.arguments import add_flags, parser
from deploy.client.documents import add_json_flag, write_document
from deploy.client.job_list import listed_jobs
from deploy.tiers.output import say
from deploy.vertex.api import STATES, STOPPED, JobStatus
from deploy.vertex.job_progress import LiveLines
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
    add_json_flag(cli)
    asked = cli.parse_args(arguments)
    statuses: list[JobStatus] = []
    for region, shown, count in listed_jobs(
        asked.region, asked.project, asked.state, asked.limit, asked.backend, session
    ):
        statuses += shown
        say(HEADER if shown else f"no {asked.state}{' ' * bool(asked.state)}jobs of this package in {region}")
        for status in shown:
            say(_line(status, session.clock.now()) + (f": {status.error}" if status.state == STOPPED else ""))
            for line in LiveLines(status, session.clock).lines(status):
                say(f"  {line}")
        if len(shown) == asked.limit < count:
            say(f"the newest {asked.limit} of {count}: --limit= shows more, --state= those in one state")
    write_document(asked, "jobs", jobs=statuses)
    return DONE


def _line(status: JobStatus, now: float) -> str:
    created = datetime.fromtimestamp(status.created or 0.0, timezone.utc).strftime("%Y-%m-%d %H:%M")
    ran, cost = describe_run(status, now)
    return f"{created}  {status.state:10} {ran:>9} {cost:>10}  {status.display_name}  {status.name}"
