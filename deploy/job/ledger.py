"""Stores what was submitted from this folder: one JSON file per submission, written before and after each step."""

import dataclasses
import json
import os
import platform
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from deploy.job.cost import format_duration, time_and_cost
from deploy.platform import buckets
from deploy.platform.api import Clock, JobStatus, retried
from deploy.platform.rest import Backend
from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.output import tell
from trainer.base.errors import PlatformFault, UserError
from trainer.base.storage import write_whole
from trainer.base.storage.gcs import Conflict, NoPermission
from trainer.base.storage.local_files import is_running

SUBMISSIONS = Path("runs/submitted")


@dataclasses.dataclass
class Attempt:
    """Describes one attempt on a tier in a region. `job` is empty until Vertex AI has named it; money is in USD.

    `sent_at`: when a request that creates the job was sent last, seconds since 1970; 0: never.
    """

    tier: str
    project: str
    region: str
    usd_per_hour: float | None
    output: str
    state: str = "SUBMITTING"  # NOT SUBMITTED, SUBMITTED, INTERRUPTED by the user, or the job's final state
    job: str = ""
    error: str = ""
    spent_usd: float | None = None
    sent_at: float = 0.0


@dataclasses.dataclass
class Submission:
    """Holds all attempts of one submission; `command` and `sources`, addresses of packages, tell what was submitted."""

    submission: str
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    command: str = ""
    sources: list[str] = dataclasses.field(default_factory=list)

    @property
    def label(self) -> str:
        """Returns the label of the last attempt's job."""
        return attempt_label(self.submission, len(self.attempts))

    @property
    def detached(self) -> bool:
        """Returns whether the command follows no job: repeated, it makes another."""
        return not {"--detach", "--detach=true"}.isdisjoint(self.command.partition(" -- ")[0].lower().split())

    def write(self) -> None:
        """Replaces the file of this submission."""
        SUBMISSIONS.mkdir(parents=True, exist_ok=True)
        content = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_whole(SUBMISSIONS / f"{self.submission}.json", content)


def attempt_label(submission: str, attempt: int = 1) -> str:
    """Returns the label of a submission's attempt, counted from 1."""
    return f"{submission}-{attempt}"


def _read_all() -> Iterator[Submission]:
    """Yields all submissions, the newest first."""
    for path in sorted(SUBMISSIONS.glob("*.json"), reverse=True):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            attempts = [Attempt(**attempt) for attempt in content.pop("attempts")]
            yield Submission(**{**content, "submission": path.stem, "attempts": attempts})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: not a record of a submission ({error}): remove it") from None


def find_attempt(job: str) -> tuple[Submission, Attempt]:
    """Returns the newest attempt with this job name, job number or submission (empty: any); LookupError if none."""
    for record in _read_all():
        for attempt in reversed(record.attempts):
            if not job or job in (record.submission, attempt.job) or attempt.job.endswith(f"/{job}"):
                return record, attempt
    raise LookupError(job)


def find_interrupted(command: str, sources: list[str]) -> Submission | None:
    """Returns the newest submission of this command and these packages, if it did not follow its job to the end."""
    for record in _read_all():
        if (record.command, record.sources) == (command, sources) and record.attempts:
            last = record.attempts[-1]
            left = {"INTERRUPTED": True, "SUBMITTING": bool(last.sent_at), "SUBMITTED": not record.detached}
            return record if left.get(last.state) else None
    return None


def record_status(record: Submission, attempt: Attempt, status: JobStatus, now: float) -> None:
    """Stores the final status of an attempt."""
    attempt.state, attempt.error = status.state, status.error
    attempt.spent_usd = time_and_cost(status, attempt.usd_per_hour, now)[1]
    record.write()


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
