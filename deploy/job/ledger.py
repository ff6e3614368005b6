"""Keeps the records of submissions, in runs/submitted/ and in the folders of comparisons.

runs/submitted/ has one file per submission, which is written before and after each step
(`deploy.job.sending`). Each job has a record in its own job directory, too, OUTPUT/submission.json:
a missing file of runs/submitted/ is made again from the jobs' labels and these records.
"""

import dataclasses
import fcntl
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deploy.base.console import tell
from deploy.platform import buckets
from deploy.platform.rest import Platform
from deploy.platform.retries import retried
from deploy.platform.vertex_api import JobStatus
from deploy.tiers.tier import LABEL
from trainer.base.errors import PlatformFault, UserError
from trainer.base.storage import write_whole, writing

SUBMISSIONS = Path("runs/submitted")
RECORD = "submission.json"


# The states of an attempt that nobody saw end.
UNFINISHED = ("SUBMITTING", "INTERRUPTED", "SUBMITTED")


@dataclasses.dataclass
class Attempt:
    """Describes one attempt on a tier in a region.

    `job` is empty until Vertex AI has named it; money is in USD.

    `sent_at`: when the last request to create the job was sent, in seconds since 1970; 0: never.
    `usd_per_hour`: an upper bound where the price under the tier's strategy is not known.
    """

    tier: str
    project: str
    region: str
    usd_per_hour: float | None
    output: str
    # NOT SUBMITTED, SUBMITTED, INTERRUPTED by the user, or the job's final state
    state: str = "SUBMITTING"
    job: str = ""
    error: str = ""
    spent_usd: float | None = None
    sent_at: float = 0.0
    name: str = ""  # the job's display name


@dataclasses.dataclass
class Submission:
    """Holds all attempts of one submission.

    `command` and `sources`, its packages' addresses, identify what was sent.
    `detached`: nobody follows its job; `folder`: that of a comparison's run, which gets a copy of
        the record.
    """

    submission: str
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    command: str = ""
    sources: list[str] = dataclasses.field(default_factory=list)
    detached: bool = False
    folder: Path | None = None

    @property
    def label(self) -> str:
        """Returns the label of the last attempt's job."""
        return attempt_label(self.submission, len(self.attempts))

    def write(self) -> None:
        """Replaces the file of this submission in the index, and in its folder."""
        content = dataclasses.asdict(self)
        del content["folder"]
        files = [SUBMISSIONS / f"{self.submission}.json"]
        if self.folder:
            files.append(self.folder / RECORD)
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(content, indent=2) + "\n")

    def record_status(self, attempt: Attempt, status: JobStatus, now: float) -> None:
        """Stores the status and the cost of an attempt's job."""
        attempt.state = status.state
        attempt.error = status.error
        if attempt.usd_per_hour is not None:  # to more digits than the label of the job has
            attempt.spent_usd = attempt.usd_per_hour * status.seconds(now) / 3600
        self.write()


def watch_hint(name: str) -> str:
    """Returns the commands for a job that nobody watches."""
    return f"watch it: python -m deploy watch {name}; cancel it: python -m deploy cancel {name}"


def attempt_label(submission: str, attempt: int = 1) -> str:
    """Returns the label of a submission's attempt, counted from 1."""
    return f"{submission}-{attempt}"


def _read(path: Path) -> Submission:
    content = json.loads(path.read_text(encoding="utf-8"))
    return Submission(
        **{**content, "attempts": [Attempt(**attempt) for attempt in content["attempts"]]}
    )


# What reading a damaged record may raise.
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def submissions() -> Iterator[Submission]:
    """Yields all submissions of the index, the newest first."""
    for path in sorted(SUBMISSIONS.glob("*.json"), reverse=True):
        try:
            yield dataclasses.replace(_read(path), submission=path.stem)
        except _DAMAGED as error:
            raise UserError(f"{path}: not a record of a submission ({error}): remove it") from None


def find_attempt(
    job: str, records: Iterable[Submission] | None = None
) -> tuple[Submission, Attempt] | None:
    """Returns the newest attempt whose job has this name, number or submission; "" for any.

    `records`: where to look, the newest first; by default the index of this folder. Returns None if
        none has the job.
    """
    for record in submissions() if records is None else records:
        for attempt in reversed(record.attempts):
            if not job or job in (
                record.submission,
                attempt.job,
                attempt.name,
                attempt.job.rpartition("/")[2],
            ):
                return record, attempt
    return None


def find_elsewhere(job: str, backend: Platform) -> tuple[Submission, Attempt] | None:
    """Returns the same for a job that another folder or machine sent, and adds it to the index.

    Finds it by the jobs' labels, and its tier and command in the record of the job directory.
    Returns None if the region has no such job.
    """
    gcp = backend.gcp
    # The submissions, as far as the labels and states of their jobs tell.
    records: dict[str, Submission] = {}
    jobs = retried(backend.jobs, backend.clock)
    for status in sorted(jobs, key=lambda status: status.created or 0.0):
        submission, _, number = status.labels.get(LABEL, "").rpartition("-")
        if not re.fullmatch(r"\d{1,3}", number):
            continue  # another program wrote this label
        attempt = Attempt(
            "",
            gcp.project,
            gcp.region,
            status.usd_per_hour,
            status.output,
            "SUBMITTED",
            status.name,
            name=status.display_name,
        )
        if status.over:
            attempt.state = status.state
            attempt.spent_usd = status.usd(backend.clock.now())
        attempts = records.setdefault(submission, Submission(submission)).attempts
        # Labels number the attempts: earlier ones that this region does not list keep their places.
        unlisted = int(number) - 1 - len(attempts)
        for _ in range(unlisted):
            attempts.append(Attempt("", gcp.project, gcp.region, None, "", "NOT SUBMITTED"))
        attempts.append(attempt)
    match = find_attempt(job, reversed(records.values()))
    if match:
        # The rest of that submission, from the records in its job directories.
        record, _ = match
        for attempt in record.attempts:
            content: dict[str, Any] = {}
            with suppress(UserError, PlatformFault, ValueError):
                content = json.loads(buckets.read_text(f"{attempt.output}/{RECORD}")[0] or "{}")
            attempt.tier = content.get("tier", "")
            if str(content.get("submission")).rpartition("-")[0] == record.submission:
                record.command = content.get("command", "")
                record.sources = content.get("sources", [])
                record.detached = content.get("detached", False)
        record.write()
    return match


@contextmanager
def sending_alone() -> Iterator[None]:
    """Waits until nobody else sends from this folder, and lets nobody else send within the block.

    Where the file system has no locks, as in some network folders, nothing is locked.
    """
    lock = SUBMISSIONS / ".lock"
    with writing(lock):
        SUBMISSIONS.mkdir(parents=True, exist_ok=True)
        lock.touch()
    with open(lock, "wb") as file:  # closing it unlocks it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waits: another command submits from this folder")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def find_in(folder: Path) -> Submission | None:
    """Returns the submission of a comparison's run, or None.

    Raises UserError if its record is damaged.
    """
    file = folder / RECORD
    try:
        return dataclasses.replace(_read(file), folder=folder) if file.exists() else None
    except _DAMAGED:
        raise UserError(
            f"{file} is damaged: see `python -m deploy jobs` for running jobs, then remove the file"
        ) from None
