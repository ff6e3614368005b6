"""Submits a job to Vertex AI: `python -m deploy submit TIER --recipe=…` checks, packages, uploads, submits, follows."""

from collections.abc import Sequence

from deploy.api.submit import prepare
from deploy.platform.clients import SESSION, Session


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Submits one job, on the first tier and region with machines for it, or shows it. Returns the exit code."""
    job = prepare(arguments, session)
    if job.args.spec:
        return job.print_spec()
    return job.stage() if job.args.out else job.run("submit")
