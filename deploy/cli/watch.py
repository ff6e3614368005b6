"""Prints states and logs of a job until it ends: `python -m deploy watch JOB`."""

import signal
from collections.abc import Sequence

from deploy.cli.arguments import parser
from deploy.cli.target import add_target, find_target
from deploy.localrun.processes import on_signals
from deploy.vertex.errors import exit_code, exit_on_api_error
from deploy.vertex.logs import watch_job
from deploy.vertex.session import SESSION, Session
from trainer.base.errors import INTERRUPTED


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Watches one job and returns the exit code for its final state."""
    cli = parser("watch", "Shows states and logs of a job until it ends; Ctrl-C leaves it running.", "[JOB]")
    add_target(cli)
    args = cli.parse_args(arguments)
    target = find_target(args, session)
    with exit_on_api_error(target.gcp), on_signals(signal.default_int_handler, signal.SIGTERM):
        status = watch_job(target.backend, target.job, target.gcp, session.clock)
    if status is None:
        return INTERRUPTED
    target.record(status, session)
    return exit_code(status)
