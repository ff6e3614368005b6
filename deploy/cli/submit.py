"""Submits a job to Vertex AI: `python -m deploy submit TIER --recipe=…` checks, packages, uploads, submits, follows."""

import signal
import sys
from collections.abc import Sequence

from deploy.client.documents import write_document, write_end
from deploy.client.prepared_job import PreparedSubmission, outcome_of, request_of
from deploy.localrun.processes import on_signals
from deploy.tiers.output import agrees, say
from deploy.vertex.errors import exit_code
from deploy.vertex.history import attempt_label
from deploy.vertex.session import SESSION, Session
from trainer.base.errors import DONE, INTERRUPTED


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Submits one job, on the first tier and region with machines for it. Returns the exit code of how it ended."""
    prepared = PreparedSubmission(arguments, session)
    if prepared.asked.dry_run:
        say(prepared.page, f"\n## The request\n{prepared.paste}")
        label = attempt_label(prepared.record.submission)
        requests = [request_of(job, label) for job in prepared.jobs]
        write_document(prepared.asked, "submit", requests=requests, about=[line for _, line in prepared.about])
        return DONE
    for _, line in prepared.about:
        say(f"# {line}")
    with on_signals(signal.default_int_handler, signal.SIGTERM):  # as Ctrl-C
        job = prepared.send(_agrees)
        code = DONE
        if prepared.asked.detach:
            say(f"watch it: python -m deploy watch {job.name}")
        else:
            status = job.follow()
            code = exit_code(status) if status else INTERRUPTED
    write_end(prepared.asked, "submit", **outcome_of(job, code))
    return code


def _agrees(text: str) -> bool:
    """Returns whether somebody at a terminal wants to pay for it."""
    return bool(sys.stdin and sys.stdin.isatty()) and agrees(f"{text}: submit it?")
