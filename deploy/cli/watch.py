"""Prints states and logs of a job until it ends: `python -m deploy watch JOB`."""

import signal
from collections.abc import Sequence

from deploy.cli.arguments import parser
from deploy.cli.target import add_notify, add_target, find_target
from deploy.localrun.processes import on_signals
from deploy.vertex.errors import exit_code, exit_on_api_error
from deploy.vertex.logs import watch_job
from deploy.vertex.notification import Notification, read_notify
from deploy.vertex.session import SESSION, Session
from trainer.errors import INTERRUPTED


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Watches one job and returns the exit code for its final state."""
    cli = parser("watch", "Shows states and logs of a job until it ends; Ctrl-C leaves it running.", "[JOB]")
    add_target(cli)
    add_notify(cli)
    args = cli.parse_args(arguments)
    target, notification = find_target(args), Notification(read_notify(args.notify), session.clock)
    with exit_on_api_error(target.gcp), notification.deferred(), on_signals(signal.default_int_handler, signal.SIGTERM):
        status = watch_job(target.open(session), target.job, target.gcp, session.clock)
        if status:
            notification.ended(status)
    if status is None:
        return INTERRUPTED
    target.record(status, session)
    return exit_code(status)
