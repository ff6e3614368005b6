"""Runs a comparison's jobs: on this machine, as `deploy local` starts them, or on Vertex AI, as
`deploy submit` does.

A job of Vertex AI is recorded in JOB_DIR before it is submitted. The same command again finds the
job, follows it if it is still running, fetches it if it has succeeded, and otherwise submits it
again with the same output.
"""

import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event

from deploy.base.console import printed_on, say
from deploy.comparison.directory import is_begun
from deploy.job.cost import CostConfirmation, cost_confirmation, price_and_limit
from deploy.job.fallback import SubmittedJob
from deploy.job.job import Job
from deploy.job.ledger import Submission, find_in
from deploy.job.options import JobOptions
from deploy.job.sending import check_resources, upload_packages
from deploy.job.watching import with_bill
from deploy.job.workload import Training, Workload
from deploy.packaging.packages import Package
from deploy.planning.paid_jobs import cost_lines, memory_lines, paid_job, planned_usd
from deploy.platform.errors import JobUnknown, api_errors, describe_failure, exit_code
from deploy.platform.local import LocalJob, local_workers
from deploy.platform.rest import Platform
from deploy.platform.retries import CLOCK, Clock, retried
from deploy.report.collection import fetched
from deploy.report.formatting import grouped
from deploy.tiers.gcp_config import needed_project, read_gcp_config
from trainer.base.errors import INTERRUPTED, PlatformFault, UserError
from trainer.base.run_files.job_files import RESULT, record_failure
from trainer.base.settings.train_config import DATA_SOURCES, split_kind
from trainer.base.storage import Address, expanded, write_whole
from trainer.base.storage.gcs import connect


class LocalRunner:
    """Runs jobs on this machine; the output of a run goes to JOB_DIR.log.

    Once `stopped` is set, every job saves its state and ends, and no other starts.
    """

    name = "local"

    def __init__(self) -> None:
        self.stopped = Event()

    def costs(self, runs: Sequence[tuple[Workload, int]]) -> Iterator[str]:
        """Yields nothing: this machine costs nothing."""
        return iter(())

    def preflight(self, runs: Sequence[tuple[Workload, Path]]) -> None:
        """Raises UserError if the data do not exist."""
        for data in {run.config.data for run, _ in runs if isinstance(run, Training)}:
            path = split_kind(data)[1]
            if not (path in DATA_SOURCES or ":" in path or os.path.exists(expanded(path))):
                raise UserError(
                    f"data={data}: there is no such path: give a folder or file of this machine"
                )

    def run(self, run: Workload, job_dir: Path) -> int:
        """Runs the workers of a run to their end and returns its exit code."""
        if not is_begun(job_dir):
            # a failed start is not part of the run's time
            (job_dir / RESULT).unlink(missing_ok=True)
        job_dir.mkdir(parents=True, exist_ok=True)
        folder = job_dir.absolute()
        # a new id each time: this is not a restart by Vertex AI
        job_id = f"{job_dir.parent.name}-{time.time_ns()}"
        arguments = replace(run, job_dir=str(folder)).arguments()
        workers = local_workers(
            run.tier, arguments, folder, job_id, program=run.local_program(folder)
        )
        with open(f"{job_dir}.log", "a", encoding="utf-8", buffering=1) as log:
            if self.stopped.is_set():
                return INTERRUPTED

            def show(worker: str, line: str) -> None:
                print(f"[{worker}] {line}\n", end="", file=log)

            job = LocalJob(workers, show, stopped=self.stopped)
            outcome = job.run()
            print(outcome.error or outcome.state, file=log)
        return outcome.code


class VertexRunner:
    """Runs jobs of Vertex AI, all with the same options and `code`, their packages.

    Once `stopped` is set, nothing waits any longer; the jobs continue.
    """

    name = "vertex"

    def __init__(
        self,
        options: JobOptions,
        code: Sequence[Package],
        submission: str,
        *,
        dry_run: bool = False,
    ) -> None:
        self._options = options
        self._code = code
        self._dry_run = dry_run
        self._clock = Clock(CLOCK.now, self._sleep)
        self.stopped = Event()
        self._jobs = dict[Path, SubmittedJob]()
        self._submissions = (f"{submission}-{number}" for number in itertools.count(1))
        self._gcp = read_gcp_config(options.project, options.region, options.bucket)
        needed_project(self._gcp.project)

    def costs(self, runs: Sequence[tuple[Workload, int]]) -> Iterator[str]:
        """Yields price, limit and warnings of each tier's jobs, and the highest total cost.

        Raises UserError for what `submit` would refuse.
        """
        if not runs:
            return
        yield from (package.about for package in self._code if package.about)
        jobs: list[Job] = []
        for run, count in runs:
            job = self._job(run)
            tier = run.tier
            jobs += [job] * count
            many = "1 job" if count == 1 else f"{count} jobs, each"
            yield (
                f"{tier.name}: {many} on {tier.machine} in {job.gcp.region}:"
                f" {price_and_limit(job.tier)}"
            )
            yield from (f"{tier.name}: {line}" for line in job.about)
        warnings = grouped((line, job.tier.name) for job in jobs for line in job.warnings)
        yield from (f"warning: {tiers}: {line}" for line, tiers in warnings.items())
        yield from memory_lines([run for run, _ in runs], force=self._options.force)
        yield from cost_lines(jobs)
        if self._dry_run:
            confirmation = self._confirmation(jobs)
            yield from confirmation.lines() or [confirmation.text]

    def _confirmation(self, jobs: Sequence[Job]) -> CostConfirmation:
        return cost_confirmation(
            [job.tier for job in jobs], planned_usd(jobs), self._options, alternatives=False
        )

    def preflight(self, runs: Sequence[tuple[Workload, Path]]) -> None:
        """Finds jobs sent before, confirms the cost of the rest, checks login, project, buckets and
        data once."""
        if not runs:
            return
        with api_errors(self._gcp):
            for run, job_dir in runs:
                # A job that was sent before is kept if it runs or succeeded; else another is sent,
                # with its output.
                earlier = find_in(job_dir)
                submission = next(self._submissions)
                jobs = [self._job(run, submission, earlier.attempts[-1].output if earlier else "")]
                job = SubmittedJob(jobs, Submission(submission, folder=job_dir), clock=self._clock)
                status = job.find(earlier) if earlier else None
                if earlier and status:
                    job.resume(earlier)
                    status = with_bill(status, self._clock.now())
                    if status.over and status.state != "SUCCEEDED":
                        earlier.record_status(earlier.attempts[-1], status, self._clock.now())
                        job.name = ""  # another attempt, with its output
                self._jobs[job_dir] = job
            jobs = [job.jobs[0] for job in self._jobs.values()]
            if new := [job.jobs[0] for job in self._jobs.values() if not job.name]:
                self._confirmation(new).confirm()
            for bucket in {job.output.split("/")[2] for job in jobs}:
                # refuse now if the results could not be read later
                connect().list(Address(bucket, ""), most=1)
            backend = Platform(self._gcp.project, self._gcp.region)
            retried(lambda: backend.jobs("none"))
            check_resources(new or jobs)
            upload_packages(new or jobs)

    def run(self, run: Workload, job_dir: Path) -> int:
        """Creates the run's job, unless it was found, follows it and fetches its results; returns
        its exit code."""
        job = self._jobs[job_dir]
        job_dir.mkdir(parents=True, exist_ok=True)
        with open(f"{job_dir}.log", "a", encoding="utf-8", buffering=1) as log:
            try:
                if not job.name:
                    # an earlier attempt's: the one in the bucket counts
                    (job_dir / RESULT).unlink(missing_ok=True)
                    self._sleep(0.0)
                    with api_errors(self._gcp):
                        job.create()
                with printed_on(log):
                    status = job.follow()
            except KeyboardInterrupt:
                return INTERRUPTED
            except JobUnknown:
                raise  # the same command finds the job again
            except (UserError, PlatformFault) as error:
                if not job.name:
                    record_failure(job_dir, f"not submitted: {error}")
                raise
            if status is None:
                say(f"{job.name} is still running; cancel it: python -m deploy cancel {job.name}")
                return INTERRUPTED
            # What a report reads is copied here, result.json last, because it marks the copy as
            # complete. A failed job gets its error there if the trainer wrote none.
            try:
                folder = fetched(job.output, "output")
                shutil.copytree(
                    folder, job_dir, ignore=shutil.ignore_patterns(RESULT), dirs_exist_ok=True
                )
                if (folder / RESULT).is_file():
                    write_whole(job_dir / RESULT, (folder / RESULT).read_bytes())
            except UserError as error:
                if status.state == "SUCCEEDED":
                    raise
                print(f"not fetched: {error}", file=log)
            if status.state != "SUCCEEDED":
                record_failure(job_dir, describe_failure(status) or status.state)
            elif not (job_dir / RESULT).is_file():
                raise UserError(
                    f"{job.output} has no result.json, though the job succeeded: remove {job_dir}"
                    " to run it again"
                )
            return exit_code(status)

    def _job(self, run: Workload, submission: str = "check", output: str = "") -> Job:
        """Returns the checked job of a run; `output`: its job directory, by default one named by
        the submission."""
        if run.tier.spec.get("baseOutputDirectory"):
            raise UserError(
                f"{run.tier.name}: its baseOutputDirectory would be the job directory of every run:"
                " remove it: each run has a separate folder in --bucket"
            )
        work = replace(run, job_dir=output) if output else run
        return paid_job(work, self._gcp, self._options, submission, self._code)

    def _sleep(self, seconds: float) -> None:
        """Sleeps, unless or until `stopped` is set: then it raises KeyboardInterrupt, as Ctrl-C
        would."""
        until = CLOCK.now() + seconds
        while not self.stopped.is_set() and (remaining := until - CLOCK.now()) > 0:
            CLOCK.sleep(min(remaining, 1.0))  # soon enough notices `stopped`
        if self.stopped.is_set():
            raise KeyboardInterrupt
