"""Cancels a job, after confirmation, and waits: `python -m deploy cancel JOB`."""

import argparse
from collections.abc import Sequence
from contextlib import suppress

from deploy.cli.arguments import parser
from deploy.cli.target import add_target, find_target
from deploy.tiers.spec_changes import LABEL
from deploy.vertex.api import JobStatus
from deploy.vertex.cancellation import cancel_and_wait, cancel_duplicate, jobs_of, originals
from deploy.vertex.errors import exit_on_api_error
from deploy.vertex.rest import Backend
from deploy.vertex.retry import Clock, retried
from deploy.vertex.session import SESSION, Session
from deploy.vertex.spending import describe_run
from trainer.base.errors import DONE, FAULT, UserError


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Cancels one job, after confirmation unless --yes is given."""
    cli = parser("cancel", "Cancels a job, and waits until it is over.", "[JOB]")
    add_target(cli)
    cli.add_boolean("yes", "do not ask for confirmation")
    args = cli.parse_args(arguments)
    target = find_target(args, session)
    with exit_on_api_error(target.gcp):
        backend = target.backend
        status = retried(lambda: backend.state(target.job), session.clock)
        if not status.over:
            _confirm(status, args, session.clock)
        if not status.over:
            status = cancel_and_wait(backend, target.job, session.clock)
        _cancel_duplicates(backend, status, session.clock)
    target.record(status, session)
    print(f"{target.job}: {status.state}")
    return DONE if status.over else FAULT


def _confirm(status: JobStatus, args: argparse.Namespace, clock: Clock) -> None:
    """Raises UserError unless the user agrees."""
    ran, cost = describe_run(status, clock.now())
    so_far = cost and f", {cost} so far"
    question = f"cancel {status.display_name} ({status.state}, {ran}{so_far})? [y/N] "
    answer = "y" if args.yes else ""
    with suppress(EOFError):
        answer = answer or input(question)
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("not cancelled: answer y, or use --yes")


def _cancel_duplicates(backend: Backend, status: JobStatus, clock: Clock) -> None:
    """Cancels the jobs that a lost response created beside this one, older ones too."""
    label = status.labels.get(LABEL)
    jobs = jobs_of(label, backend, clock) if label else []
    by_name = originals(jobs)
    for job in jobs:
        if job.name != status.name and by_name[job.name] is by_name.get(status.name) and not job.over:
            cancel_duplicate(job, status.name, backend, clock)
