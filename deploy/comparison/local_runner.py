"""The runs of a comparison on this machine: each tier's workers as processes, as `deploy local` starts them."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deploy.cli.job_flags import new_submission
from deploy.comparison.directory import is_begun
from deploy.localrun.processes import LocalJob
from deploy.localrun.workers import local_workers
from deploy.spec.job_spec import settings_on
from deploy.spec.tier import Tier, TierFacts
from trainer.config.recipe import resolve
from trainer.config.train_config import DATA_SOURCES, said_kind
from trainer.errors import INTERRUPTED, UserError
from trainer.storage import expanded
from trainer.storage.run_layout import RESULT


class LocalRunner:
    """Runs `tiers`; what a run prints goes beside its job directory, as JOB_DIR.log."""

    name = "local"

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._jobs: list[LocalJob] = []
        self._stopped = False
        self._lock = threading.Lock()

    def check(self, tier: TierFacts, flags: Sequence[str]) -> None:
        """UserError for what the trainer would refuse on this tier."""
        settings_on(self._tiers[tier.name], flags)

    def costs(self, runs: Sequence[tuple[TierFacts, Sequence[str], int]]) -> Iterator[str]:
        """Nothing: this machine costs nothing."""
        return iter(())

    def preflight(self, tiers: Mapping[TierFacts, Sequence[str]]) -> None:
        """This machine is there; are the data?"""
        for flags in tiers.values():
            data = resolve(flags).config.data
            path = said_kind(data)[1]
            if not (path in DATA_SOURCES or ":" in path or os.path.exists(expanded(path))):
                raise UserError(f"data={data}: there is no such path: give a folder or file of this machine")

    def run(self, tier: TierFacts, flags: Sequence[str], job_dir: Path) -> int:
        """Waits for the run and returns its exit code."""
        if not is_begun(job_dir):
            (job_dir / RESULT).unlink(missing_ok=True)  # the time of what came to nothing is not the run's
        given = [*flags, f"--job_dir={job_dir.absolute()}"]
        attempt = f"compare-{tier.name}-{new_submission()}"  # of its own: it is no restart by Vertex AI
        workers = local_workers(self._tiers[tier.name], given, job_dir.absolute(), attempt)
        with open(f"{job_dir}.log", "a", encoding="utf-8", buffering=1) as log:
            job = LocalJob(workers, job_dir, lambda worker, line: print(f"[{worker}] {line}", file=log))
            with self._lock:
                if self._stopped:
                    return INTERRUPTED
                self._jobs.append(job)
            outcome = job.run()
            print(outcome.error or outcome.state, file=log)
        with self._lock:
            self._jobs.remove(job)
        return outcome.code

    def stop(self) -> None:
        """Every run saves its state and ends; nothing starts any more."""
        with self._lock:
            self._stopped = True
            for job in self._jobs:
                job.stop()
