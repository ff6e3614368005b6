"""Reserves a job directory in a bucket for one submission, so that no two running jobs write to it.

The record submission.json in the directory names the submission that may write there. It is replaced only if its
generation is still the one that was read, from whichever machine, and only once no job of that submission runs. It also
holds what the jobs of earlier submissions into the directory cost.
"""

import dataclasses
import functools
import json
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

from deploy.tiers.gcp_config import GcpConfig
from deploy.vertex.api import ApiError
from deploy.vertex.cancellation import oldest_first
from deploy.vertex.rest import Backend
from deploy.vertex.retry import RETRY_S, Clock, retried
from deploy.vertex.spending import format_duration, spent
from trainer.base.errors import UserError

SUBMISSION_RECORD = "submission.json"
UNLISTED_S = RETRY_S + 300.0  # a submission lasts no longer: if no job of it is listed after that, there is none

OpenBackend = Callable[[str, str], Backend]  # (project, region)


def reserve(output: str, label: str, gcp: GcpConfig, open_backend: OpenBackend, clock: Clock) -> None:
    """Reserves the job directory `output` for the submission `label`. Raises UserError if another one may write to it.

    An account that may not write there is warned: the job's account may have the permission.
    """
    uri, backend = f"{output}/{SUBMISSION_RECORD}", open_backend(gcp.project, gcp.region)
    about = {"submission": label, "project": gcp.project, "region": gcp.region, "host": platform.node()}
    text = functools.partial(_text, {**about, "time": clock.now()})
    try:
        if retried(functools.partial(backend.write, uri, text(0.0), 0), clock):
            return
        present, generation = retried(functools.partial(backend.read, uri), clock) or ("", 0)
        record = _parse(present, output) if present else None
        if record and record.submission == label:  # the response to the first write was lost
            return
        before_us = _spent_once_free(record, output, open_backend, clock) if record else 0.0
        if retried(functools.partial(backend.write, uri, text(before_us), generation), clock):
            return
    except ApiError as error:
        if error.code != 403:
            raise
        warning = f"warning: {uri} cannot be written ({error}): make sure that no other job writes to that folder"
        print(warning, file=sys.stderr, flush=True)
        return
    raise UserError(f"{output}: another submission into it began at this moment: use another --name or --job_dir")


def release(output: str, label: str, backend: Backend) -> None:
    """Removes the record of a submission that created no job, or its name if jobs before it cost something.

    Does nothing if that fails.
    """
    uri = f"{output}/{SUBMISSION_RECORD}"
    try:
        text, generation = backend.read(uri) or ("{}", 0)
        content = json.loads(text)
        if content.get("submission") != label:
            return
        if content.get("spent_usd"):
            backend.write(uri, _text({**content, "submission": ""}, content["spent_usd"]), generation)
        else:
            backend.delete(uri, generation)
    except (ApiError, ValueError, AttributeError):
        return


@dataclasses.dataclass(frozen=True)
class _Record:
    """Holds the content of submission.json. `submission`: empty if that created no job."""

    submission: str
    project: str
    region: str
    host: str
    time: float
    spent_usd: float = 0.0  # by the submissions before it


def _text(about: Mapping[str, Any], spent_usd: float) -> str:
    return json.dumps({**about, "spent_usd": round(spent_usd, 4)}, indent=2) + "\n"


def _parse(text: str, output: str) -> _Record:
    try:
        content = json.loads(text)
        submission, project, region, host = (str(content[name]) for name in ("submission", "project", "region", "host"))
        return _Record(submission, project, region, host, float(content["time"]), float(content.get("spent_usd", 0.0)))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{output}/{SUBMISSION_RECORD} is damaged: remove it if no job writes to that folder") from None


def _spent_once_free(record: _Record, output: str, open_backend: OpenBackend, clock: Clock) -> float:
    """Returns the USD that the jobs of the record, and those before, cost; UserError if one of them may run."""
    if not record.submission:
        return record.spent_usd
    jobs = oldest_first(record.submission, open_backend(record.project, record.region), clock)
    running = next((job for job in jobs if not job.over), None)
    if running:
        raise UserError(
            f"{output}: a job writes to it already: {running.name} ({running.state}): watch it: python -m deploy watch "
            f"{running.name}; cancel it: python -m deploy cancel {running.name}; or use another --name or --job_dir"
        )
    left = record.time + UNLISTED_S - clock.now()
    if not jobs and left > 0:
        raise UserError(
            f"{output}: a submission into it began on {record.host} "
            f"{format_duration(max(clock.now() - record.time, 0.0))} ago, and its job is not listed yet: "
            f"wait {format_duration(left)}, or remove {output}/{SUBMISSION_RECORD} if it was stopped"
        )
    return record.spent_usd + sum(spent(job, clock.now()) for job in jobs)
