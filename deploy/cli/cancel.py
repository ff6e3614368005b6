"""Cancels a job, or deletes a persistent resource, after confirmation, and waits: `python -m deploy cancel JOB`."""

import argparse
from collections.abc import Sequence
from contextlib import suppress

from deploy.cli.arguments import parser
from deploy.cli.target import add_target, find_resource_target, find_target
from deploy.spec.gcp_config import GcpConfig
from deploy.spec.spec_changes import LABEL
from deploy.vertex.api import Backend, JobStatus
from deploy.vertex.cancellation import cancel_and_wait, cancel_double, oldest_first, that_count
from deploy.vertex.costs import describe_run
from deploy.vertex.errors import exit_on_api_error
from deploy.vertex.resources import delete_and_wait, end_guards, find_resource
from deploy.vertex.retry import Clock, retried
from deploy.vertex.session import SESSION, Session
from trainer.errors import DONE, FAULT, UserError


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Cancels one job, or deletes one persistent resource, after confirmation unless --yes is given."""
    cli = parser("cancel", "Cancels a job, or deletes a persistent resource, and waits until it is over.", "[JOB]")
    add_target(cli)
    cli.add_boolean("yes", "do not ask for confirmation")
    args = cli.parse_args(arguments)
    if resource := find_resource_target(args):
        return _delete(*resource, args, session)
    target = find_target(args)
    with exit_on_api_error(target.gcp):
        backend = target.open(session)
        status = retried(lambda: backend.state(target.job), session.clock)
        if not status.over:
            _confirm(f"cancel {status.display_name}", status, args, session.clock)
        if not status.over:
            status = cancel_and_wait(backend, target.job, session.clock)
        _cancel_doubles(backend, status, session.clock)
    target.record(status, session)
    print(f"{target.job}: {status.state}")
    return DONE if status.over else FAULT


def _delete(gcp: GcpConfig, id: str, args: argparse.Namespace, session: Session) -> int:
    """Deletes a persistent resource, which cancels the jobs in it, and then cancels its guard."""
    with exit_on_api_error(gcp):
        backend, clock = session.open(args.backend, gcp.project, gcp.region), session.clock
        status = find_resource(backend, id, clock)
        if status:
            _confirm(f"delete persistent resource {id} and cancel the jobs in it", status, args, clock)
            status = delete_and_wait(backend, id, clock)
        end_guards(backend, id, retried(backend.jobs, clock), clock)
    print(
        f"persistent resource {id}: {'DELETED, ' + ' '.join(describe_run(status, clock.now())) if status else 'gone'}"
    )
    return DONE


def _confirm(what: str, status: JobStatus, args: argparse.Namespace, clock: Clock) -> None:
    """Raises UserError unless the user agrees."""
    ran, cost = describe_run(status, clock.now())
    question, answer = f"{what} ({status.state}, {ran}{cost and f', {cost} so far'})? [y/N] ", "y" if args.yes else ""
    with suppress(EOFError):
        answer = answer or input(question)
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("not cancelled: answer y, or use --yes")


def _cancel_doubles(backend: Backend, status: JobStatus, clock: Clock) -> None:
    """Cancels the jobs that a lost response created beside this one."""
    label = status.labels.get(LABEL)
    jobs = oldest_first(label, backend, clock) if label else []
    counts = {name: job.name for name, job in that_count(jobs).items()}
    for job in jobs:
        if job.name != status.name and counts[job.name] == counts.get(status.name) and not job.over:
            cancel_double(job, status, backend, clock)
