"""Implements the verbs for jobs that exist, whoever submitted them: `jobs`, `watch`, `logs` and `cancel`."""

import signal
from collections.abc import Sequence
from datetime import UTC, datetime

from deploy.api.jobs import JobsOptions, attach, jobs_by_region
from deploy.base.console import agrees, say, tell
from deploy.base.options import parsed, seconds
from deploy.cli.parsing import parser, write_document
from deploy.job.cost import describe_run
from deploy.job.watching import LiveLines, show
from deploy.job.workload import JobOptions
from deploy.platform.errors import exit_code
from deploy.platform.gcloud_and_sdk import SESSION, Session
from deploy.platform.local import on_signals
from deploy.platform.vertex_api import STOPPED, JobStatus
from deploy.tiers.tier import LABEL, PRICE_LABEL
from trainer.base.errors import DONE, INTERRUPTED, UserError
from trainer.base.settings.fields import Parser, integer_in


def jobs(arguments: Sequence[str], session: Session = SESSION) -> int:
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
            for line in LiveLines(session.clock).lines(status):
                say(f"  {line}")
        if len(newest) == args.limit < count:
            say(f"the newest {args.limit} of {count}: --limit= shows more, --state= those in one state")
    write_document(args, "jobs", jobs=statuses)
    return DONE


def watch(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Prints states and logs of a job until it ends, and returns the exit code for its final state."""
    cli = _parser_of_a_job("watch", "Shows states and logs of a job until it ends; Ctrl-C leaves it running.", "[JOB]")
    args = cli.parse_args(arguments)

    with on_signals(signal.default_int_handler, signal.SIGTERM):
        job = attach(args.job, args.project, args.region, args.backend, session)
        status = job.follow((lambda line: write_document(args, "watch", line=line)) if args.json else show)
    code = exit_code(status) if status else INTERRUPTED
    write_document(args, "watch", status=status, exit_code=code)
    return code


def logs(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Prints the log of a job that runs or has ended, and does not follow it."""
    summary = "Prints the log of a job so far, and ends; `watch` follows it."
    cli = _parser_of_a_job("logs", summary, "[JOB] [--tail=COUNT]")
    cli.add_argument("--tail", type=integer_in(1, 1_000_000), default=0, metavar="COUNT", help="only the newest lines")
    cli.add_argument("--worker", default="", metavar="NUMBER", help="only of one worker: 0 is the chief; or as Vertex "
                     "AI calls it, as workerpool1-0")  # fmt: skip
    cli.add_argument("--since", type=seconds, default=0.0, metavar="TIME", help="only of the last 10m, 2h or 1d")
    args = cli.parse_args(arguments)
    job = attach(args.job, args.project, args.region, args.backend, session)
    lines = job.logs(args.tail, args.worker, args.since)
    for line in lines:
        write_document(args, "logs", line=line)
        if not args.json:
            show(line)
    if not lines:
        selection = " of that time or worker" if args.worker or args.since else ""
        tell(f"{job.name}: no lines in its log{selection}")
    return DONE


def cancel(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Cancels a job, after confirmation unless --yes is given, and waits until it is over."""
    cli = _parser_of_a_job("cancel", "Cancels a job, and waits until it is over.", "[JOB]")
    cli.add_boolean("yes", "do not ask for confirmation")
    args = cli.parse_args(arguments)

    def confirm(status: JobStatus) -> None:
        ran, cost = describe_run(status, session.clock.now())
        question = f"cancel {status.display_name} ({status.state}, {ran}{cost and f', {cost} so far'})?"
        if not (args.yes or agrees(question)):
            raise UserError("not cancelled: answer y, or use --yes")

    job = attach(args.job, args.project, args.region, args.backend, session)
    status = job.stop(confirm)
    say(f"{job.name}: {status.state}")
    write_document(args, "cancel", status=status, exit_code=DONE)
    return DONE


def _parser_of_a_job(verb: str, description: str, usage: str) -> Parser:
    """Returns the parser of a verb with the arguments that name a job, as `attach` takes them."""
    cli = parser(verb, description, usage, JobOptions, "project", "backend")
    cli.add_argument("job", nargs="?", default="", metavar="JOB", help="its name, display name, number or submission "
                     "(default: the last)")  # fmt: skip
    cli.add_argument("--region", default="", metavar="NAME,NAME", help="where to look for it (default: gcloud's "
                     "ai/region, and those of the submissions from this folder)")  # fmt: skip
    return cli
