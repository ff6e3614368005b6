"""`python -m deploy watch JOB`: states and logs of a job until it ends."""

from collections.abc import Sequence

from deploy.cli.arguments import parser
from deploy.cli.target import Target, add_target, find_target
from deploy.vertex.errors import exit_code, explained
from deploy.vertex.history import note
from deploy.vertex.logs import watch_job
from deploy.vertex.session import SESSION, Session
from trainer.errors import INTERRUPTED


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Watches one job; the exit code says how it ended."""
    own = parser("watch", "Shows states and logs of a job until it ends; Ctrl-C leaves it running.", "[JOB]")
    add_target(own)
    target: Target = find_target(own.parse_args(arguments))
    with explained(target.gcp):
        status = watch_job(target.open(session), target.job, target.gcp, session.clock)
    if status is None:
        return INTERRUPTED
    if target.kept:
        note(*target.kept, status, session.clock.now())
    return exit_code(status)
