"""Submits a job to Vertex AI: `python -m deploy submit TIER --recipe=…` checks, packages, uploads, submits, follows."""

from collections.abc import Sequence

from deploy.client.prepared_job import prepare
from deploy.vertex.session import SESSION, Session


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Submits one job, on the first tier and region with machines for it. Returns the exit code of how it ended."""
    return prepare(arguments, session).run("submit")
