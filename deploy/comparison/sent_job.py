"""Keeps, in FOLDER/vertex.json, the job that was or may have been submitted: the same command finds it again."""

import dataclasses
import json
from pathlib import Path

from deploy.vertex.api import JobStatus
from deploy.vertex.cancellation import jobs_of, newest_original
from deploy.vertex.history import attempt_label
from deploy.vertex.rest import Backend
from deploy.vertex.retry import Clock
from trainer.base.errors import UserError
from trainer.base.run_files.records import read_json
from trainer.base.storage import write_whole

SENT_JOB = "vertex.json"


@dataclasses.dataclass(frozen=True)
class SentJob:
    """Describes a job by its submission; `output` is its job directory, gs://…"""

    project: str
    region: str
    submission: str
    output: str = ""

    @classmethod
    def read(cls, folder: Path) -> "SentJob | None":
        """Returns the job of a folder, or None; UserError if the record is damaged."""
        file = folder / SENT_JOB
        if not file.exists():
            return None
        try:
            return cls(**read_json(file)[0])
        except TypeError:
            raise UserError(
                f"{file} is damaged: see `python -m deploy jobs` for running jobs, then remove the file"
            ) from None

    def write(self, folder: Path) -> None:
        """Records the job, before it is submitted."""
        write_whole(folder / SENT_JOB, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def find(self, backend: Backend, clock: Clock) -> JobStatus | None:
        """Returns the job's status, and cancels its doubles; None if it was never created."""
        return newest_original(jobs_of(attempt_label(self.submission), backend, clock), backend, clock)
