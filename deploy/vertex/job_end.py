"""Settles a job that is over: what it was billed for, and whether it ended itself at a limit that was sent with it."""

import dataclasses
import json
from contextlib import suppress

from deploy.vertex import buckets
from deploy.vertex.api import STOPPED, JobStatus
from deploy.vertex.buckets import QUICKLY
from deploy.vertex.spending import time_and_cost, usd_per_hour
from trainer.base.errors import PlatformFault, UserError
from trainer.base.run_files.run_layout import BILLED, RESULT
from trainer.base.storage import Address, parse
from trainer.base.storage.gcs import connect

_UNREADABLE = (UserError, PlatformFault, ValueError, AttributeError, TypeError)


def settled(status: JobStatus, now: float) -> JobStatus:
    """Returns the status of a job, STOPPED with the reason if it ended itself; records the bill of one that is over.

    The bill is in its job directory: one that cannot be written changes nothing.
    """
    with suppress(*_UNREADABLE):
        folder = parse(status.output, "output")
        if folder and status.over and status.started:
            _add_bill(folder / BILLED, status, now)
    reason = stopped(status.output) if status.state == "SUCCEEDED" and status.limited else ""
    return dataclasses.replace(status, state=STOPPED, error=reason) if reason else status


def stopped(output: str) -> str:
    """Returns why the job that wrote to a job directory ended itself; "" if it did not, or nobody can read that."""
    with suppress(*_UNREADABLE):
        folder = parse(output, "output")
        result = json.loads(buckets.read(folder / RESULT, QUICKLY)[0] or "{}") if folder else {}
        if result.get("state") == "stopped":
            return str(result.get("error") or "a limit")
    return ""


def _add_bill(file: Address, status: JobStatus, now: float) -> None:
    """Adds what a job was billed for: its start to its end, with all restarts, and USD if it has a price label."""
    text, generation = buckets.read(file, QUICKLY)
    content = json.loads(text or "{}")
    seconds, usd = time_and_cost(status, usd_per_hour(status), now)
    jobs = {**content.get("jobs", {}), status.name: {"seconds": round(seconds, 3), "usd": usd and round(usd, 4)}}
    if jobs != content.get("jobs"):
        connect(QUICKLY).upload((json.dumps({"jobs": jobs}, indent=2) + "\n").encode(), file, generation)
