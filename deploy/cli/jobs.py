"""Implements the verbs for jobs that exist, whoever submitted them: `jobs`, `watch`, `logs` and
`cancel`."""

import signal
from collections.abc import Sequence
from datetime import UTC, datetime

from deploy.api.jobs import JOBS, JobsOptions, attach, jobs_by_region
from deploy.api.request import verb_usage
from deploy.base.console import agrees, say, tell
from deploy.cli.output import JSON, write_document
from deploy.job.cost import describe_run
from deploy.job.vertex_job import VertexJob
from deploy.job.watching import LiveLines, show
from deploy.platform.errors import exit_code
from deploy.platform.local import on_signals
from deploy.platform.retries import CLOCK
from deploy.platform.vertex_api import STOPPED, JobStatus
from deploy.tiers.tier import LABEL, PRICE_LABEL
from trainer.base.errors import DONE, INTERRUPTED, UserError
from trainer.base.settings.fields import Seconds, options_class, parse_options, setting, setting_of


@options_class
class JobsFlags(JobsOptions):
    """Holds the flags of `jobs`."""

    json: bool = JSON


@options_class
class JobFlags:
    """Holds the flags that name a job, as `attach` takes them."""

    job: str = setting(
        "",
        "its name, display name, number or submission (default: the last)",
        "JOB",
        positional=True,
    )
    project: str = setting_of(JobsOptions, "project")
    region: str = setting(
        "",
        "where to look for it (default: gcloud's ai/region, and those of the submissions from this"
        " folder)",
        "NAME,NAME",
    )
    json: bool = JSON

    def attached(self) -> VertexJob:
        """Returns the job that the flags name."""
        return attach(self.job, self.project, self.region)


@options_class
class LogsFlags(JobFlags):
    """Holds the flags of `logs`."""

    tail: int = setting(0, "only the newest lines", "COUNT", minimum=1, maximum=1_000_000)
    worker: str = setting(
        "",
        "only of one worker: 0 is the chief; or as Vertex AI calls it, as workerpool1-0",
        "NUMBER",
    )
    since: Seconds = setting(Seconds(0), "only of the last 10m, 2h or 1d")


@options_class
class CancelFlags(JobFlags):
    """Holds the flags of `cancel`."""

    yes: bool = setting(False, "do not ask for confirmation")


def run_jobs(arguments: Sequence[str]) -> int:
    """Prints, for each region, one line for each job, newest first."""
    args = parse_options(JobsFlags, arguments, JOBS)
    statuses: list[JobStatus] = []
    for region, newest, count in jobs_by_region(args):
        statuses += newest
        none = f"no {args.state} jobs of this package in {region}".replace("  ", " ")
        say("created (UTC)     state      time         cost  name  job" if newest else none)
        for status in newest:
            created = datetime.fromtimestamp(status.created or 0.0, UTC).strftime("%Y-%m-%d %H:%M")
            ran, cost = describe_run(status, CLOCK.now())
            why = f": {status.error}" if status.state in (STOPPED, "EXPIRED") else ""
            say(
                f"{created}  {status.state:10} {ran:>9} {cost:>10}  {status.display_name} "
                f" {status.name}{why}"
            )
            labels = [
                f"{key}={value}"
                for key, value in status.labels.items()
                if key not in (LABEL, PRICE_LABEL)
            ]
            say(f"  {', '.join([f'{status.machine} in {region}', *labels])}")
            for line in LiveLines(CLOCK).lines(status):
                say(f"  {line}")
        if len(newest) == args.limit < count:
            say(
                f"the newest {args.limit} of {count}: --limit= shows more, --state= those in one"
                " state"
            )
    write_document(args, "jobs", jobs=statuses)
    return DONE


def run_watch(arguments: Sequence[str]) -> int:
    """Prints states and logs of a job until it ends, and returns the exit code of its end."""
    summary = "Shows states and logs of a job until it ends; Ctrl-C leaves it running."
    args = parse_options(JobFlags, arguments, verb_usage("watch", "[JOB]", summary))

    with on_signals(signal.default_int_handler, signal.SIGTERM):
        status = args.attached().follow(
            (lambda line: write_document(args, "watch", line=line)) if args.json else show
        )
    code = exit_code(status) if status else INTERRUPTED
    write_document(args, "watch", status=status, exit_code=code)
    return code


def run_logs(arguments: Sequence[str]) -> int:
    """Prints the log of a job that runs or has ended, and does not follow it."""
    summary = "Prints the log of a job so far, and ends; `watch` follows it."
    args = parse_options(LogsFlags, arguments, verb_usage("logs", "[JOB] [--tail=COUNT]", summary))
    job = args.attached()
    lines = job.logs(args.tail, args.worker, args.since)
    for line in lines:
        write_document(args, "logs", line=line)
        if not args.json:
            show(line)
    if not lines:
        selection = " of that time or worker" if args.worker or args.since else ""
        tell(f"{job.name}: no lines in its log{selection}")
    return DONE


def run_cancel(arguments: Sequence[str]) -> int:
    """Cancels a job, after confirmation unless --yes is given, and waits until it is over."""
    usage = verb_usage("cancel", "[JOB]", "Cancels a job, and waits until it is over.")
    args = parse_options(CancelFlags, arguments, usage)

    def confirm(status: JobStatus) -> None:
        ran, cost = describe_run(status, CLOCK.now())
        question = (
            f"cancel {status.display_name} ({status.state}, {ran}{cost and f', {cost} so far'})?"
        )
        if not (args.yes or agrees(question)):
            raise UserError("not cancelled: answer y, or use --yes")

    job = args.attached()
    status = job.stop(confirm)
    say(f"{job.name}: {status.state}")
    write_document(args, "cancel", status=status, exit_code=DONE)
    return DONE
