"""Prints the log of a job so far: `python -m deploy logs JOB --tail=100`."""

from collections.abc import Sequence

from deploy.api.jobs import attach
from deploy.base.console import tell
from deploy.base.options import seconds
from deploy.cli.parsing import add_target, parser, write_document
from deploy.job.watching import show
from deploy.platform.gcloud_and_sdk import SESSION, Session
from trainer.base.errors import DONE
from trainer.base.settings.fields import whole


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Prints the log of a job that runs or has ended, and does not follow it."""
    cli = parser("logs", "Prints the log of a job so far, and ends; `watch` follows it.", "[JOB] [--tail=COUNT]")
    add_target(cli)
    cli.add_argument("--tail", type=whole(1, 1_000_000), default=0, metavar="COUNT", help="only the newest lines")
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
