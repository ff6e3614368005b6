"""Runs a comparison on this machine: each tier's workers as processes, as `deploy local` starts them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.comparison.directory import is_begun
from deploy.localrun.local_jobs import LocalJobs
from deploy.tiers.job_request import JobRequest
from trainer.base.errors import UserError
from trainer.base.run_files.run_layout import RESULT
from trainer.base.settings.train_config import DATA_SOURCES, split_kind
from trainer.base.storage import expanded


class LocalRunner:
    """Runs jobs on this machine; the output of a run goes to JOB_DIR.log."""

    name = "local"

    def __init__(self) -> None:
        self._jobs = LocalJobs()
        self.stop = self._jobs.stop

    def check(self, run: JobRequest) -> None:
        """Checks nothing beyond what `request_on` does."""

    def costs(self, runs: Sequence[tuple[JobRequest, int]]) -> Iterator[str]:
        """Yields nothing: this machine costs nothing."""
        return iter(())

    def preflight(self, runs: Sequence[tuple[JobRequest, Path]]) -> None:
        """Raises UserError if the data do not exist."""
        for run, _ in runs:
            if run.training:
                check_local_data(run.training.config.data)

    def run(self, run: JobRequest, job_dir: Path) -> int:
        """Returns the exit code of a run."""
        if not is_begun(job_dir):
            (job_dir / RESULT).unlink(missing_ok=True)  # a failed start is not part of the run's time
        return self._jobs.run(run, job_dir).code


def check_local_data(data: str) -> None:
    """Raises UserError if the data are a path of this machine that does not exist."""
    path = split_kind(data)[1]
    if not (path in DATA_SOURCES or ":" in path or os.path.exists(expanded(path))):
        raise UserError(f"data={data}: there is no such path: give a folder or file of this machine")
