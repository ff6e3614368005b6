"""What was submitted from this folder: one JSON file a submission, written before and after each step of it."""

import dataclasses
import json
from pathlib import Path

from deploy.vertex.api import JobStatus
from deploy.vertex.costs import spent
from trainer.errors import UserError
from trainer.storage import write_whole

SUBMISSIONS = Path("runs/submitted")


@dataclasses.dataclass
class Attempt:
    """One tier in one region. `job` is empty until Vertex AI has named it; money is in USD."""

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
    """All attempts of one submission; `write` keeps them."""

    submission: str
    attempts: list[Attempt] = dataclasses.field(default_factory=list)

    def write(self) -> None:
        """Replaces the file."""
        SUBMISSIONS.mkdir(parents=True, exist_ok=True)
        content = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_whole(SUBMISSIONS / f"{self.submission}.json", content)


def read_submissions() -> list[Submission]:
    """Every submission of this folder, the newest last."""
    return [_read(path) for path in sorted(SUBMISSIONS.glob("*.json"))]


def _read(path: Path) -> Submission:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        attempts = [Attempt(**attempt) for attempt in content["attempts"]]
        if not all(_is_sound(attempt) for attempt in attempts):
            raise ValueError("an attempt holds what is none")
        return Submission(path.stem, attempts)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a record of a submission ({error}): remove it") from None


def _is_sound(attempt: Attempt) -> bool:
    money = ("usd_per_hour", "spent_usd")
    values = dataclasses.asdict(attempt)
    texts = all(isinstance(value, str) for name, value in values.items() if name not in money)
    return texts and all(values[name] is None or isinstance(values[name], (int, float)) for name in money)


def find(job: str) -> tuple[Submission, Attempt]:
    """The attempt of a job's name or number, the last one of a submission, or of all; LookupError where none is."""
    for record in reversed(read_submissions()):
        for attempt in reversed(record.attempts):
            if not job or job in (record.submission, attempt.job) or attempt.job.endswith(f"/{job}"):
                return record, attempt
    raise LookupError(job)


def note(record: Submission, attempt: Attempt, status: JobStatus, now: float) -> None:
    """Keeps how an attempt ended."""
    attempt.state, attempt.error = status.state, status.error
    attempt.spent_usd = spent(status, attempt.usd_per_hour, now)[1]
    record.write()
