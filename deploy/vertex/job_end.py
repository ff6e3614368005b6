"""Settles a job that is over: what it was billed for, and whether it ended itself at a limit that was sent with it."""

import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from deploy.vertex import buckets
from deploy.vertex.api import STOPPED, JobStatus
from deploy.vertex.spending import time_and_cost, usd_per_hour
from trainer.base.errors import PlatformFault, UserError
from trainer.base.run_files.records import BILLED, RESULT

_UNREADABLE = (UserError, PlatformFault, ValueError, AttributeError, TypeError)


def settled(status: JobStatus, now: float) -> JobStatus:
    """Records the bill of a job that is over, if its job directory can be written; returns as `with_reason`."""
    with suppress(*_UNREADABLE):
        if status.output and status.over and status.started:
            _add_bill(f"{status.output}/{BILLED}", status, now)
    return with_reason(status)


def with_reason(status: JobStatus) -> JobStatus:
    """Returns the status of a job, STOPPED with the reason if it ended itself."""
    reason = why_stopped(result_of(status.output)) if status.state == "SUCCEEDED" and status.limited else ""
    return dataclasses.replace(status, state=STOPPED, error=reason) if reason else status


def result_of(output: str) -> dict[str, Any]:
    """Returns the content of result.json in a job directory; {} if there is none, or nobody can read it."""
    with suppress(*_UNREADABLE):
        return dict(json.loads(buckets.read(f"{output}/{RESULT}", quick=True)[0] or "{}"))
    return {}


def why_stopped(result: Mapping[str, Any]) -> str:
    """Returns why the job that left this result.json ended itself; "" if it did not."""
    return str(result.get("error") or "a limit") if result.get("state") == "stopped" else ""


def _add_bill(uri: str, status: JobStatus, now: float) -> None:
    """Adds what a job was billed for: its start to its end, with all restarts, and USD if it has a price label."""
    text, generation = buckets.read(uri, quick=True)
    before = json.loads(text or "{}").get("jobs", {})
    seconds, usd = time_and_cost(status, usd_per_hour(status), now)
    jobs = {**before, status.name: {"seconds": round(seconds, 3), "usd": usd and round(usd, 4)}}
    if jobs != before:
        buckets.write(uri, json.dumps({"jobs": jobs}, indent=2) + "\n", generation, quick=True)
