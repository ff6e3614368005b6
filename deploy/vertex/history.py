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
    """Describes one attempt on a tier in a region. `job` is empty until Vertex AI has named it; money is in USD."""

    tier: str
    project: str
    region: str
    usd_per_hour: float | None
    output: str
    state: str = "SUBMITTING"
    job: str = ""
    error: str = ""
    spent_usd: float | None = None


@dataclasses.dataclass
class Submission:
    """Holds all attempts of one submission."""

    submission: str
    attempts: list[Attempt] = dataclasses.field(default_factory=list)

    def write(self) -> None:
        """Replaces the file of this submission."""
        SUBMISSIONS.mkdir(parents=True, exist_ok=True)
        content = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_whole(SUBMISSIONS / f"{self.submission}.json", content)


def _read(path: Path) -> Submission:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        attempts = [Attempt(**attempt) for attempt in content["attempts"]]
        if not all(_is_valid(attempt) for attempt in attempts):
            raise ValueError("an attempt has a value of the wrong type")
        return Submission(path.stem, attempts)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a record of a submission ({error}): remove it") from None


def _is_valid(attempt: Attempt) -> bool:
    money = ("usd_per_hour", "spent_usd")
    values = dataclasses.asdict(attempt)
    texts = all(isinstance(value, str) for name, value in values.items() if name not in money)
    return texts and all(values[name] is None or isinstance(values[name], (int, float)) for name in money)


def find_attempt(job: str) -> tuple[Submission, Attempt]:
    """Returns the newest attempt with this job name, job number or submission (empty: any); LookupError if none."""
    for record in reversed([_read(path) for path in sorted(SUBMISSIONS.glob("*.json"))]):
        for attempt in reversed(record.attempts):
            if not job or job in (record.submission, attempt.job) or attempt.job.endswith(f"/{job}"):
                return record, attempt
    raise LookupError(job)


def record_status(record: Submission, attempt: Attempt, status: JobStatus, now: float) -> None:
    """Stores the final status of an attempt."""
    attempt.state, attempt.error = status.state, status.error
    attempt.spent_usd = time_and_cost(status, attempt.usd_per_hour, now)[1]
    record.write()
