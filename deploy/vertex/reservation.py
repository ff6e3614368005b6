"""Reserves a job directory in a bucket for one submission, so that no two running jobs write to it.

The record submission.json in the directory names the submission that may write there. It is replaced only if its
generation is still the one that was read, from whichever machine, and only once no job of that submission runs.
"""

import functools
import json
import platform
import sys
from collections.abc import Callable

from deploy.spec.gcp_config import GcpConfig
from deploy.vertex.api import ApiError, Backend
from deploy.vertex.cancellation import oldest_first
from deploy.vertex.costs import format_duration
from deploy.vertex.retry import RETRY_S, Clock, retried
from trainer.errors import UserError

RECORD = "submission.json"
UNLISTED_S = RETRY_S + 300.0  # a submission lasts no longer: if no job of it is listed after that, there is none

OpenBackend = Callable[[str, str], Backend]  # (project, region)


def reserve(output: str, label: str, gcp: GcpConfig, open_backend: OpenBackend, clock: Clock) -> None:
    """Reserves the job directory `output` for the submission `label`. Raises UserError if another one may write to it.

    An account that may not write there is warned: the job's account may have the permission.
    """
    uri, backend = f"{output}/{RECORD}", open_backend(gcp.project, gcp.region)
    about = {"submission": label, "project": gcp.project, "region": gcp.region, "host": platform.node()}
    text = json.dumps({**about, "time": clock.now()}, indent=2) + "\n"
    try:
        if retried(functools.partial(backend.write, uri, text, 0), clock):
            return
        found = retried(functools.partial(backend.read, uri), clock)
        before, generation = found or ("", 0)
        if before and _is_free(before, label, output, open_backend, clock):
            return
        if retried(functools.partial(backend.write, uri, text, generation), clock):
            return
    except ApiError as error:
        if error.code != 403:
            raise
        warning = f"warning: {uri} cannot be written ({error}): make sure that no other job writes to that folder"
        print(warning, file=sys.stderr, flush=True)
        return
    raise UserError(f"{output}: another submission into it began at this moment: use another --name or --job_dir")


def release(output: str, label: str, backend: Backend) -> None:
    """Removes the record of a submission that created no job; does nothing if that fails."""
    uri = f"{output}/{RECORD}"
    try:
        found = backend.read(uri)
        if found and json.loads(found[0]).get("submission") == label:
            backend.delete(uri, found[1])
    except (ApiError, ValueError, AttributeError):
        return


def _is_free(text: str, label: str, output: str, open_backend: OpenBackend, clock: Clock) -> bool:
    """Returns whether the record is this submission's own; False if it may be replaced; UserError if a job may run."""
    try:
        record = json.loads(text)
        other, host, began = str(record["submission"]), str(record["host"]), float(record["time"])
        place = str(record["project"]), str(record["region"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{output}/{RECORD} is damaged: remove it if no job writes to that folder") from None
    if other == label:  # the response to the first write was lost
        return True
    jobs = oldest_first(other, open_backend(*place), clock)
    running = next((job for job in jobs if not job.over), None)
    if running:
        raise UserError(
            f"{output}: a job writes to it already: {running.name} ({running.state}): watch it: python -m deploy watch "
            f"{running.name}; cancel it: python -m deploy cancel {running.name}; or use another --name or --job_dir"
        )
    left = began + UNLISTED_S - clock.now()
    if not jobs and left > 0:
        raise UserError(
            f"{output}: a submission into it began on {host} {format_duration(max(clock.now() - began, 0.0))} ago, and "
            f"its job is not listed yet: wait {format_duration(left)}, or remove {output}/{RECORD} if it was stopped"
        )
    return False
