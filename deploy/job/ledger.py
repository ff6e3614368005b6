"""Records what was sent, and decides whether a submission may write to a job directory; no other module does.

Each job has its record in its own job directory, OUTPUT/submission.json. It names the submission that may write there.
Any machine may replace it, but only if its generation is still the one that was read, and only once no job of that
submission runs or can still appear. runs/submitted/ is an index of the records, with one file per submission. It is
written before and after each step; a missing file is made again from the jobs' labels and records. A run of a
comparison has a copy of its file in its own folder.
"""

import dataclasses
import itertools
import json
import os
import platform
import re
import shlex
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from deploy.base.console import tell
from deploy.job.cost import format_duration, time_and_cost, usd_per_hour
from deploy.platform import buckets
from deploy.platform.rest import Platform
from deploy.platform.vertex_api import Clock, JobStatus, retried
from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.tier import LABEL
from trainer.base.errors import PlatformFault, UserError
from trainer.base.run_files.job_files import read_json
from trainer.base.storage import write_whole
from trainer.base.storage.gcs import Conflict, NoPermission
from trainer.base.storage.local_files import is_running

SUBMISSIONS = Path("runs/submitted")
RECORD = "submission.json"
RECORD_OF_0_2 = "vertex.json"  # what version 0.2 called the file of a comparison's run
SILENT_S = 300.0  # a submission on another machine whose record was not renewed for so long is taken to have ended
# The longest time until a new job is listed. An assumption: Vertex AI does not document how far its lists may lag.
LISTED_S = 60.0

OpenBackend = Callable[[str, str], Platform]  # (project, region)


@dataclasses.dataclass
class Attempt:
    """Describes one attempt on a tier in a region. `job` is empty until Vertex AI has named it; money is in USD.

    `sent_at`: when the last request to create the job was sent, in seconds since 1970; 0: never.
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
    name: str = ""  # the job's display name


@dataclasses.dataclass
class Submission:
    """Holds all attempts of one submission; `command` and `sources`, its packages' addresses, identify what was sent.

    `folder`: that of a comparison's run, which gets a copy of the record.
    """

    submission: str
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    command: str = ""
    sources: list[str] = dataclasses.field(default_factory=list)
    folder: Path | None = None

    @property
    def label(self) -> str:
        """Returns the label of the last attempt's job."""
        return attempt_label(self.submission, len(self.attempts))

    @property
    def detached(self) -> bool:
        """Returns whether the command had --detach: given again, it creates another job."""
        return "--detach=true" in itertools.takewhile("--".__ne__, shlex.split(self.command))

    def write(self) -> None:
        """Replaces the file of this submission in the index, and in its folder."""
        content = {name: value for name, value in dataclasses.asdict(self).items() if name != "folder"}
        for file in (SUBMISSIONS / f"{self.submission}.json", *([self.folder / RECORD] if self.folder else [])):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(content, indent=2) + "\n")

    def record_status(self, attempt: Attempt, status: JobStatus, now: float) -> None:
        """Stores the status and the cost of an attempt's job."""
        attempt.state, attempt.error = status.state, status.error
        attempt.spent_usd = time_and_cost(status, attempt.usd_per_hour, now)[1]
        self.write()


def watch_hint(name: str) -> str:
    """Returns the commands for a job that nobody watches."""
    return f"watch it: python -m deploy watch {name}; cancel it: python -m deploy cancel {name}"


def attempt_label(submission: str, attempt: int = 1) -> str:
    """Returns the label of a submission's attempt, counted from 1."""
    return f"{submission}-{attempt}"


def _read(path: Path) -> Submission:
    content = json.loads(path.read_text(encoding="utf-8"))
    return Submission(**{**content, "attempts": [Attempt(**attempt) for attempt in content["attempts"]]})


# What reading a damaged record may raise.
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _read_all() -> Iterator[Submission]:
    """Yields all submissions of the index, the newest first."""
    for path in sorted(SUBMISSIONS.glob("*.json"), reverse=True):
        try:
            yield dataclasses.replace(_read(path), submission=path.stem)
        except _DAMAGED as error:
            raise UserError(f"{path}: not a record of a submission ({error}): remove it") from None


def find_attempt(job: str, records: Iterable[Submission] | None = None) -> tuple[Submission, Attempt] | None:
    """Returns the newest attempt whose job has this name, number, display name or submission; "" stands for any.

    `records`: where to look, the newest first; by default the index of this folder. Returns None if none has the job.
    """
    for record in _read_all() if records is None else records:
        for attempt in reversed(record.attempts):
            if not job or job in (record.submission, attempt.job, attempt.name, attempt.job.rpartition("/")[2]):
                return record, attempt
    return None


def find_elsewhere(job: str, gcp: GcpConfig, backend: Platform, clock: Clock) -> tuple[Submission, Attempt] | None:
    """Returns the same for a job that another folder or machine sent, and adds it to the index.

    Finds it by the jobs' labels, and its tier and command in the record of the job directory. Returns None if the
    region has no such job.
    """
    records: dict[str, Submission] = {}
    for status in sorted(retried(backend.jobs, clock), key=lambda status: status.created or 0.0):
        submission, _, number = status.labels.get(LABEL, "").rpartition("-")
        if not re.fullmatch(r"\d{1,3}", number):
            continue  # another program wrote this label
        attempt = Attempt("", gcp.project, gcp.region, usd_per_hour(status), status.output, "SUBMITTED", status.name,
                          name=status.display_name)  # fmt: skip
        if status.over:
            attempt.state = status.state
            attempt.spent_usd = time_and_cost(status, attempt.usd_per_hour, clock.now())[1]
        attempts = records.setdefault(submission, Submission(submission)).attempts
        # Labels number the attempts: earlier ones that this region does not list keep their places.
        unlisted = int(number) - 1 - len(attempts)
        attempts += [Attempt("", gcp.project, gcp.region, None, "", "NOT SUBMITTED") for _ in range(unlisted)]
        attempts.append(attempt)
    known = find_attempt(job, reversed(records.values()))
    if known:
        record, _ = known
        for attempt in record.attempts:
            content: dict[str, Any] = {}
            with suppress(UserError, PlatformFault, ValueError):
                content = json.loads(buckets.read(f"{attempt.output}/{RECORD}")[0] or "{}")
            attempt.tier = content.get("tier", "")
            if str(content.get("submission")).rpartition("-")[0] == record.submission:
                record.command, record.sources = content.get("command", ""), content.get("sources", [])
        record.write()
    return known


def sent_regions() -> list[str]:
    """Returns the regions of all submissions from this folder, that of the newest first."""
    return [*dict.fromkeys(attempt.region for record in _read_all() for attempt in reversed(record.attempts))]


def find_interrupted(command: str, sources: list[str]) -> Submission | None:
    """Returns the newest submission of this command and these packages, if it did not follow its job to the end."""
    for record in _read_all():
        if (record.command, record.sources) == (command, sources) and record.attempts:
            last = record.attempts[-1]
            unfinished = {"INTERRUPTED": True, "SUBMITTING": bool(last.sent_at), "SUBMITTED": not record.detached}
            return record if unfinished.get(last.state) else None
    return None


def find_in(folder: Path) -> Submission | None:
    """Returns the submission of a comparison's run, also by version 0.2, or None. Raises UserError if it is damaged."""
    file, old = folder / RECORD, folder / RECORD_OF_0_2
    try:
        if file.exists():
            return dataclasses.replace(_read(file), folder=folder)
        if not old.exists():
            return None
        file, content = old, read_json(old)[0]
        attempt = Attempt("", content["project"], content["region"], None, content.get("output", ""))
        return Submission(content["submission"], [attempt], folder=folder)
    except _DAMAGED:
        raise UserError(
            f"{file} is damaged: see `python -m deploy jobs` for running jobs, then remove the file"
        ) from None


def is_sent(folder: Path) -> bool:
    """Returns whether a job of a comparison's run was, or may have been, submitted."""
    return any((folder / name).exists() for name in (RECORD, RECORD_OF_0_2))


class Reservation:
    """Reserves the job directory of a submission's last attempt, so that no other submission writes to it.

    An account that may not write there gets a warning and reserves nothing: the job's own account may be allowed to.
    """

    def __init__(self, record: Submission, open_backend: OpenBackend, clock: Clock) -> None:
        self._record, self._attempt, self._clock, self._open = record, record.attempts[-1], clock, open_backend
        self._output, self._uri = self._attempt.output, f"{self._attempt.output}/{RECORD}"
        self._about = {
            "submission": record.label, "project": self._attempt.project, "region": self._attempt.region,
            "host": platform.node(), "machine": _machine(), "process": os.getpid(),
        }  # fmt: skip
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
        """Records, in the directory and in the index, that the submission goes on and sends a request now.

        Raises UserError if another submission took the directory meanwhile, for example while this machine slept.
        """
        if self._generation is not None:
            self._write(self._generation, sending=True)
        self._attempt.sent_at = self._clock.now()
        self._record.write()

    def complete(self, job: str) -> None:
        """Records the job that was created. If the bucket fails, a lost index cannot be restored in full."""
        self._attempt.job, self._attempt.state = job, "SUBMITTED"
        self._record.write()
        if self._generation is not None:
            with suppress(UserError, PlatformFault):
                self._write(self._generation, sending=True, job=job, tier=self._attempt.tier,
                            command=self._record.command, sources=self._record.sources)  # fmt: skip

    def release(self) -> None:
        """Frees the directory after no job was created. Does nothing if it was not reserved; ignores failures."""
        with suppress(UserError, PlatformFault, ValueError, AttributeError):
            text, generation = buckets.read(self._uri)
            if json.loads(text or "{}").get("submission") == self._about["submission"]:
                buckets.delete(self._uri, generation)

    def _write(self, generation: int, *, sending: bool, **more: Any) -> None:
        text = json.dumps({**self._about, "time": self._clock.now(), "sending": sending, **more}, indent=2) + "\n"
        try:
            self._generation = buckets.write(self._uri, text, generation, quick=bool(more))
        except Conflict:
            raise UserError(
                f"{self._output}: another submission into it began meanwhile: use another --name or --job_dir"
            ) from None

    def _wait_until_free(self, text: str) -> None:
        """Returns once the submission of the record `text` can have no running job. Raises UserError while it may."""
        try:
            record: Mapping[str, Any] = json.loads(text)
            began, submission = float(record["time"]), str(record["submission"])
            place = str(record["project"]), str(record["region"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{self._uri} is damaged: remove it if no job writes to that folder") from None
        ended_here = record.get("machine") == _machine() and not is_running(str(record.get("process")))
        until = began + (SILENT_S if not ended_here else LISTED_S if record.get("sending") else 0.0)
        while True:
            jobs = retried(partial(self._open(*place).jobs, submission), self._clock)
            now = self._clock.now()
            if running := next((job for job in jobs if not job.over), None):
                raise UserError(
                    f"{self._output}: a job writes to it already: {running.name} ({running.state}): "
                    f"{watch_hint(running.name)}; or use another --name or --job_dir"
                )
            if jobs or now >= until:
                return
            if not ended_here:
                raise UserError(
                    f"{self._output}: a submission into it began on {record.get('host')}, its last sign of life is "
                    f"{format_duration(max(now - began, 0.0))} old, and its job is not listed yet: "
                    f"wait {format_duration(until - now)}, or remove {self._uri} if it was stopped"
                )
            tell(f"looks for {until - now:.0f} s for a job of a submission that ended here")
            self._clock.sleep(until - now)


def _machine() -> str:
    """Returns an identifier of this machine since its last start, and of this container on it."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"{platform.node()} {uuid.getnode():x}"
