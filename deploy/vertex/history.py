"""Stores what was submitted from this folder: one JSON file per submission, written before and after each step."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from deploy.vertex.api import JobStatus
from deploy.vertex.spending import time_and_cost
from trainer.base.errors import UserError
from trainer.base.storage import write_whole

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
