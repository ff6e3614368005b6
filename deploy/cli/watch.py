"""Prints states and logs of a job until it ends: `python -m deploy watch JOB`."""

import signal
from collections.abc import Sequence

from deploy.api.jobs import attach
from deploy.cli.parsing import add_target, parser, write_document
from deploy.job.watching import show
from deploy.platform.errors import exit_code
from deploy.platform.gcloud_and_sdk import SESSION, Session
from deploy.platform.local import on_signals
from deploy.platform.vertex_api import WatchLine
from trainer.base.errors import INTERRUPTED


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Watches one job and returns the exit code for its final state."""
    cli = parser("watch", "Shows states and logs of a job until it ends; Ctrl-C leaves it running.", "[JOB]")
    add_target(cli)
    args = cli.parse_args(arguments)

    def write_line(line: WatchLine) -> None:
        write_document(args, "watch", line=line)

    with on_signals(signal.default_int_handler, signal.SIGTERM):
        job = attach(args.job, args.project, args.region, args.backend, session)
        status = job.follow(write_line if args.json else show)
    code = exit_code(status) if status else INTERRUPTED
    write_document(args, "watch", status=status, exit_code=code)
    return code
