"""Cancels a job, after confirmation, and waits: `python -m deploy cancel JOB`."""

from collections.abc import Sequence

from deploy.api.jobs import attach
from deploy.base.console import agrees, say
from deploy.cli.parsing import add_target, parser, write_document
from deploy.job.cost import describe_run
from deploy.platform.gcloud_and_sdk import SESSION, Session
from deploy.platform.vertex_api import JobStatus
from trainer.base.errors import DONE, UserError


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Cancels one job, after confirmation unless --yes is given."""
    cli = parser("cancel", "Cancels a job, and waits until it is over.", "[JOB]")
    add_target(cli)
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
