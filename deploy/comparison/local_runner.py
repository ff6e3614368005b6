"""Runs a comparison on this machine: each tier's workers as processes, as `deploy local` starts them."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.comparison.directory import is_begun
from deploy.localrun.processes import LocalJob
from deploy.localrun.workers import local_workers
from deploy.tiers.job_request import JobRequest
from trainer.base.errors import INTERRUPTED, UserError
from trainer.base.run_files.records import RESULT
from trainer.base.settings.train_config import DATA_SOURCES, split_kind
from trainer.base.storage import expanded


class LocalRunner:
    """Runs jobs on this machine; the output of a run goes to JOB_DIR.log."""

    name = "local"

    def __init__(self) -> None:
        self._running: list[LocalJob] = []
        self._lock = threading.Lock()
        self._stopped = False

    def check(self, run: JobRequest) -> None:
        """Checks nothing beyond what `request_on` does."""

    def costs(self, runs: Sequence[tuple[JobRequest, int]]) -> Iterator[str]:
        """Yields nothing: this machine costs nothing."""
        return iter(())

    def preflight(self, runs: Sequence[tuple[JobRequest, Path]]) -> None:
        """Raises UserError if the data do not exist."""
        for data in {run.training.config.data for run, _ in runs if run.training}:
            path = split_kind(data)[1]
            if not (path in DATA_SOURCES or ":" in path or os.path.exists(expanded(path))):
                raise UserError(f"data={data}: there is no such path: give a folder or file of this machine")

    def run(self, run: JobRequest, job_dir: Path) -> int:
        """Returns the exit code of a run."""
        if not is_begun(job_dir):
            (job_dir / RESULT).unlink(missing_ok=True)  # a failed start is not part of the run's time
        job_dir.mkdir(parents=True, exist_ok=True)
        folder = job_dir.absolute()
        job_id = f"{job_dir.parent.name}-{time.time_ns()}"  # a new id each time: this is not a restart by Vertex AI
        arguments = run.in_job_dir(str(folder)).arguments()
        workers = local_workers(run.tier, arguments, folder, job_id, program=run.local_program(folder))
        with open(f"{job_dir}.log", "a", encoding="utf-8", buffering=1) as log:
            job = LocalJob(workers, lambda worker, line: print(f"[{worker}] {line}", file=log))
            with self._lock:
                if self._stopped:
                    return INTERRUPTED
                self._running.append(job)
            outcome = job.run()
            print(outcome.error or outcome.state, file=log)
        with self._lock:
            self._running.remove(job)
        return outcome.code

    def stop(self) -> None:
        """Makes every job save its state and end; starts no other."""
        with self._lock:
            self._stopped = True
            for job in self._running:
                job.stop()
