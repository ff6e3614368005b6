"""`python -m deploy cancel JOB`: asks, cancels, and waits until the job is over."""

from collections.abc import Sequence

from deploy.cli.arguments import parser
from deploy.cli.target import add_target, find_target
from deploy.vertex.api import Backend, JobStatus
from deploy.vertex.costs import duration, price_of, spent
from deploy.vertex.errors import explained
from deploy.vertex.history import note
from deploy.vertex.retry import Clock, retried
from deploy.vertex.session import SESSION, Session
from trainer.errors import DONE, FAULT, UserError

WAIT_S = 900.0  # for machines to be taken down
POLL_S = 5.0


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Cancels one job, after a question unless --yes."""
    own = parser("cancel", "Cancels a job and waits until it is over.", "[JOB]")
    add_target(own)
    own.add_boolean("yes", "do not ask")
    asked = own.parse_args(arguments)
    target = find_target(asked)
    with explained(target.gcp):
        backend = target.open(session)
        status = retried(lambda: backend.state(target.job), session.clock)
        if not status.over and not (asked.yes or _agreed(status, session.clock)):
            raise UserError("not cancelled: answer y, or say --yes")
        if not status.over:
            status = _cancel(backend, target.job, session.clock)
    if target.kept:
        note(*target.kept, status, session.clock.now())
    print(f"{target.job}: {status.state}")
    return DONE if status.over else FAULT


def _agreed(status: JobStatus, clock: Clock) -> bool:
    ran, usd = spent(status, price_of(status), clock.now())
    money = "" if usd is None else f", {usd:.2f} USD so far"
    try:
        answer = input(f"cancel {status.display_name} ({status.state}, {duration(ran)}{money})? [y/N] ")
    except EOFError:
        answer = ""
    return answer.strip().lower() in ("y", "yes")


def _cancel(backend: Backend, name: str, clock: Clock) -> JobStatus:
    """The status once the job is over, or after WAIT_S."""
    retried(lambda: backend.cancel(name), clock)
    began = clock.now()
    while True:
        status = retried(lambda: backend.state(name), clock)
        if status.over or clock.now() - began > WAIT_S:
            return status
        clock.sleep(POLL_S)
