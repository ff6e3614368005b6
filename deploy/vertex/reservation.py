"""Reserves a job directory in a bucket for one submission, so that no two running jobs write to it.

The record submission.json in the directory names the submission that may write there. It is replaced only if its
generation is still the one that was read, from whichever machine, and only once no job of that submission runs or can
still appear.
"""

import json
import os
import platform
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.output import tell
from deploy.vertex import buckets
from deploy.vertex.rest import Backend
from deploy.vertex.retry import Clock, retried
from deploy.vertex.spending import format_duration
from trainer.base.errors import PlatformFault, UserError
from trainer.base.storage.gcs import Conflict, NoPermission
from trainer.base.storage.local_files import is_running

SUBMISSION_RECORD = "submission.json"
SILENT_S = 300.0  # a submission on another machine that did not renew its record for so long has ended
# So long after a request a job that it created is listed. How long lists of Vertex AI may lag is not documented.
LISTED_S = 60.0

OpenBackend = Callable[[str, str], Backend]  # (project, region)


class Reservation:
    """Represents the right of one submission to write to the job directory `output`.

    An account that may not write there is warned, and reserves nothing: the job's account may have the permission.
    """

    def __init__(self, output: str, label: str, gcp: GcpConfig, open_backend: OpenBackend, clock: Clock) -> None:
        self._output, self._uri, self._clock, self._open = output, f"{output}/{SUBMISSION_RECORD}", clock, open_backend
        self._about = {"submission": label, "project": gcp.project, "region": gcp.region, "host": platform.node(),
                       "machine": _machine(), "process": os.getpid()}  # fmt: skip
        self._generation: int | None = None  # of the record; None: not reserved

    def take(self) -> None:
        """Reserves the directory. Raises UserError if another submission may write to it."""
        try:
            text, generation = buckets.read(self._uri)
            if text:
                self._wait_until_free(text)
            self._write(generation, sending=False)
        except NoPermission as error:
            tell(f"warning: {error}: make sure that no other job writes to {self._output}")

    def renew(self) -> None:
        """Shows that the submission goes on, and that it sends a request now.

        Raises UserError if another submission took the directory meanwhile, as while this machine slept.
        """
        if self._generation is not None:
            self._write(self._generation, sending=True)

    def release(self) -> None:
        """Frees the directory, as no job was created. Does nothing if that fails, or if it was not reserved."""
        with suppress(UserError, PlatformFault, ValueError, AttributeError):
            text, generation = buckets.read(self._uri)
            if json.loads(text or "{}").get("submission") == self._about["submission"]:
                buckets.delete(self._uri, generation)

    def _write(self, generation: int, *, sending: bool) -> None:
        record = {**self._about, "time": self._clock.now(), "sending": sending}
        try:
            self._generation = buckets.write(self._uri, json.dumps(record, indent=2) + "\n", generation)
        except Conflict:
            raise UserError(
                f"{self._output}: another submission into it began meanwhile: use another --name or --job_dir"
            ) from None

    def _wait_until_free(self, text: str) -> None:
        """Returns once no job of the record's submission can appear. Raises UserError while one may run."""
        try:
            record: Mapping[str, Any] = json.loads(text)
            began, submission = float(record["time"]), str(record["submission"])
            place = str(record["project"]), str(record["region"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{self._uri} is damaged: remove it if no job writes to that folder") from None
        ended = record.get("machine") == _machine() and not is_running(str(record.get("process")))
        until = began + (SILENT_S if not ended else LISTED_S if record.get("sending") else 0.0)
        while True:
            jobs = retried(partial(self._open(*place).jobs, submission), self._clock)
            now = self._clock.now()
            if running := next((job for job in jobs if not job.over), None):
                raise UserError(
                    f"{self._output}: a job writes to it already: {running.name} ({running.state}): watch it: python "
                    f"-m deploy watch {running.name}; cancel it: python -m deploy cancel {running.name}; or use "
                    "another --name or --job_dir"
                )
            if jobs or now >= until:
                return
            if not ended:
                raise UserError(
                    f"{self._output}: a submission into it began on {record.get('host')}, its last sign of life is "
                    f"{format_duration(max(now - began, 0.0))} old, and its job is not listed yet: "
                    f"wait {format_duration(until - now)}, or remove {self._uri} if it was stopped"
                )
            tell(f"looks for {until - now:.0f} s for a job of a submission that ended here")
            self._clock.sleep(until - now)


def _machine() -> str:
    """Returns what tells this machine, since its last start, and its container from others."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"{platform.node()} {uuid.getnode():x}"
