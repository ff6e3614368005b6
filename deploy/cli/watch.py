"""`python -m deploy watch JOB`: states and logs of a job until it ends."""

from collections.abc import Sequence

from deploy.cli.arguments import parser
from deploy.cli.target import DESK, Desk, Target, add_target, find_target
from deploy.vertex.errors import exit_code, explained
from deploy.vertex.history import note
from deploy.vertex.logs import watch_job
from trainer.errors import INTERRUPTED


def main(arguments: Sequence[str], desk: Desk = DESK) -> int:
    """Watches one job; the exit code says how it ended."""
    own = parser("watch", "Shows states and logs of a job until it ends; Ctrl-C leaves it running.", "[JOB]")
    add_target(own)
    target: Target = find_target(own.parse_args(arguments))
    with explained(target.place):
        status = watch_job(target.open(desk), target.job, target.place, desk.clock)
    if status is None:
        return INTERRUPTED
    if target.kept:
        note(*target.kept, status, desk.clock.now())
    return exit_code(status)
