"""Stores what was submitted from this folder: one JSON file per submission, written before and after each step."""

import dataclasses
import json
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


def _read_all() -> list[Submission]:
    return [_read(path) for path in sorted(SUBMISSIONS.glob("*.json"), reverse=True)]


def _read(path: Path) -> Submission:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        attempts = [Attempt(**attempt) for attempt in content.pop("attempts")]
        if not all(_is_valid(attempt) for attempt in attempts):
            raise ValueError("an attempt has a value of the wrong type")
        return Submission(**{**content, "submission": path.stem, "attempts": attempts})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not a record of a submission ({error}): remove it") from None


def _is_valid(attempt: Attempt) -> bool:
    numbers = ("usd_per_hour", "spent_usd", "sent_at")
    values = dataclasses.asdict(attempt)
    texts = all(isinstance(value, str) for name, value in values.items() if name not in numbers)
    return texts and all(values[name] is None or isinstance(values[name], (int, float)) for name in numbers)


def find_attempt(job: str) -> tuple[Submission, Attempt]:
    """Returns the newest attempt with this job name, job number or submission (empty: any); LookupError if none."""
    for record in _read_all():
        for attempt in reversed(record.attempts):
            if not job or job in (record.submission, attempt.job) or attempt.job.endswith(f"/{job}"):
                return record, attempt
    raise LookupError(job)


def find_interrupted(command: str, sources: list[str]) -> Submission | None:
    """Returns the newest submission of this command and these packages, if it did not follow its job to the end."""
    same = (record for record in _read_all() if (record.command, record.sources) == (command, sources))
    newest = next((record for record in same if record.attempts), None)
    if newest is None:
        return None
    last = newest.attempts[-1]
    left = {"INTERRUPTED": True, "SUBMITTING": bool(last.sent_at), "SUBMITTED": not newest.detached}
    return newest if left.get(last.state) else None


def record_status(record: Submission, attempt: Attempt, status: JobStatus, now: float) -> None:
    """Stores the final status of an attempt."""
    attempt.state, attempt.error = status.state, status.error
    attempt.spent_usd = time_and_cost(status, attempt.usd_per_hour, now)[1]
    record.write()
