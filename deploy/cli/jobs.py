"""Lists the jobs in a region that this package created, from any machine: `python -m deploy jobs`."""

from collections.abc import Sequence
from datetime import UTC, datetime

from deploy.api.jobs import JobsOptions, jobs_by_region
from deploy.base.console import say
from deploy.base.options import parsed
from deploy.cli.parsing import parser, write_document
from deploy.job.cost import describe_run
from deploy.job.watching import LiveLines
from deploy.platform.gcloud_and_sdk import SESSION, Session
from deploy.platform.vertex_api import STOPPED, JobStatus
from deploy.tiers.tier import LABEL, PRICE_LABEL
from trainer.base.errors import DONE


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Prints, for each region, one line for each job, newest first."""
    cli = parser("jobs", "Lists the jobs that this package submitted, region by region.", "[--region=NAME,NAME]",
                 JobsOptions)  # fmt: skip
    args = cli.parse_args(arguments)
    statuses: list[JobStatus] = []
    for region, newest, count in jobs_by_region(parsed(JobsOptions, args), session):
        statuses += newest
        header = "created (UTC)     state      time         cost  name  job"
        say(header if newest else f"no {f'{args.state} ' if args.state else ''}jobs of this package in {region}")
        for status in newest:
            created = datetime.fromtimestamp(status.created or 0.0, UTC).strftime("%Y-%m-%d %H:%M")
            ran, cost = describe_run(status, session.clock.now())
            why = f": {status.error}" if status.state in (STOPPED, "EXPIRED") else ""
            say(f"{created}  {status.state:10} {ran:>9} {cost:>10}  {status.display_name}  {status.name}{why}")
            labels = [f"{key}={value}" for key, value in status.labels.items() if key not in (LABEL, PRICE_LABEL)]
            say(f"  {', '.join([f'{status.machine} in {region}', *labels])}")
            for line in LiveLines(status, session.clock).lines(status):
                say(f"  {line}")
        if len(newest) == args.limit < count:
            say(f"the newest {args.limit} of {count}: --limit= shows more, --state= those in one state")
    write_document(args, "jobs", jobs=statuses)
    return DONE
