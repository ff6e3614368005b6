"""Settles a job that is over: what it was billed for, and whether it ended itself at a limit that was sent with it."""

import dataclasses
import json
from contextlib import suppress

from deploy.vertex import buckets
from deploy.vertex.api import STOPPED, JobStatus
from deploy.vertex.spending import time_and_cost, usd_per_hour
from trainer.base.errors import PlatformFault, UserError
from trainer.base.run_files.records import BILLED, RESULT

_UNREADABLE = (UserError, PlatformFault, ValueError, AttributeError, TypeError)


def settled(status: JobStatus, now: float) -> JobStatus:
    """Records what a job that is over was billed for, if its job directory can be written; returns as `with_reason`.

    That is the time from its start to its end, with all restarts, and USD if it has a price label.
    """
    with suppress(*_UNREADABLE):
        if status.output and status.over and status.started:
            text, generation = buckets.read(f"{status.output}/{BILLED}", quick=True)
            before = json.loads(text or "{}").get("jobs", {})
            seconds, usd = time_and_cost(status, usd_per_hour(status), now)
            jobs = {**before, status.name: {"seconds": round(seconds, 3), "usd": usd and round(usd, 4)}}
            if jobs != before:
                content = json.dumps({"jobs": jobs}, indent=2) + "\n"
                buckets.write(f"{status.output}/{BILLED}", content, generation, quick=True)
    return with_reason(status)


def with_reason(status: JobStatus) -> JobStatus:
    """Returns the status of a job, STOPPED with the reason if its result.json says that it ended itself."""
    with suppress(*_UNREADABLE):
        if status.state == "SUCCEEDED" and status.limited:
            result = json.loads(buckets.read(f"{status.output}/{RESULT}", quick=True)[0] or "{}")
            if result.get("state") == "stopped":
                return dataclasses.replace(status, state=STOPPED, error=str(result.get("error") or "a limit"))
    return status
