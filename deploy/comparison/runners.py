"""Runs a comparison's jobs: on this machine, as `deploy local` starts them, or on Vertex AI, as `deploy submit` does.

A job of Vertex AI is recorded in JOB_DIR before it is submitted. The same command again finds the job, follows it if it
is still running, fetches it if it has succeeded, and otherwise submits it again with the same output.
"""

import dataclasses
import itertools
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

from deploy.comparison.directory import is_begun
from deploy.job.cost import CostQuestion, cost_question, price_and_limit
from deploy.job.creation import check_resources, newest_original, submit_job, upload_packages
from deploy.job.following import follow_job, settled
from deploy.job.job import Job, job_of
from deploy.job.ledger import Attempt, Submission, find_attempt, find_in
from deploy.job.work import Order, Training, Work
from deploy.planning.kept_plans import cost_lines, memory_lines, planned_usd, with_limits
from deploy.platform.api import ApiError, Clock, JobStatus, retried
from deploy.platform.clients import Session
from deploy.platform.errors import StateUnknownError, api_errors, describe_error, describe_failure, exit_code
from deploy.platform.local import LocalJob, local_workers
from deploy.platform.rest import Platform
from deploy.report.collection import fetched
from deploy.tiers.gcp_config import GcpConfig, needed_project, read_gcp_config
from deploy.tiers.output import say
from trainer.base.errors import INTERRUPTED, PlatformFault, UserError
from trainer.base.run_files.records import RESULT, record_failure
from trainer.base.settings.train_config import DATA_SOURCES, split_kind
from trainer.base.storage import Address, expanded, write_whole
from trainer.base.storage.gcs import connect


class LocalRunner:
    """Runs jobs on this machine; the output of a run goes to JOB_DIR.log."""

    name = "local"

    def __init__(self) -> None:
        self._running: list[LocalJob] = []
        self._lock = threading.Lock()
        self._stopped = False

    def check(self, run: Work) -> None:
        """Checks nothing beyond what `work_on` does."""

    def costs(self, runs: Sequence[tuple[Work, int]]) -> Iterator[str]:
        """Yields nothing: this machine costs nothing."""
        return iter(())

    def preflight(self, runs: Sequence[tuple[Work, Path]]) -> None:
        """Raises UserError if the data do not exist."""
        for data in {run.config.data for run, _ in runs if isinstance(run, Training)}:
            path = split_kind(data)[1]
            if not (path in DATA_SOURCES or ":" in path or os.path.exists(expanded(path))):
                raise UserError(f"data={data}: there is no such path: give a folder or file of this machine")

    def run(self, run: Work, job_dir: Path) -> int:
        """Returns the exit code of a run."""
        if not is_begun(job_dir):
            (job_dir / RESULT).unlink(missing_ok=True)  # a failed start is not part of the run's time
        job_dir.mkdir(parents=True, exist_ok=True)
        folder = job_dir.absolute()
        job_id = f"{job_dir.parent.name}-{time.time_ns()}"  # a new id each time: this is not a restart by Vertex AI
        arguments = dataclasses.replace(run, job_dir=str(folder)).arguments()
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


Log = Callable[[object], object]  # writes a line
STOP_DELAY_S = 1.0  # longest delay until a sleep notices `stop`


class Stopped(Exception):
    """Ends a run that `stop` interrupted."""


class VertexRunner:
    """Runs jobs of Vertex AI, as the order of a submission says."""

    name = "vertex"

    def __init__(self, order: Order, session: Session, *, dry_run: bool = False) -> None:
        self._order, self._session, self._dry_run = order, session, dry_run
        self._clock = Clock(session.clock.now, self._sleep)
        self._stopped, self._uploading = threading.Event(), threading.Lock()
        self._submissions = (f"{order.submission}-{number}" for number in itertools.count(1))

    @cached_property
    def _gcp(self) -> GcpConfig:
        """Reads the configuration when it is first needed, after the command itself was checked."""
        asked = self._order.asked
        gcp = read_gcp_config(asked.project, asked.region, asked.bucket)
        needed_project(gcp.project)
        return gcp

    def check(self, run: Work) -> None:
        """Raises UserError if `submit` would refuse the job, or if all runs would share its output."""
        if run.tier.spec.get("baseOutputDirectory"):
            raise UserError(
                f"{run.tier.name}: its baseOutputDirectory would be the job directory of every run: remove it: "
                "each run has a separate folder in --bucket"
            )
        self._job(run)
        memory_lines([run], plan=self._order.asked.plan, force=self._order.asked.force)

    def costs(self, runs: Sequence[tuple[Work, int]]) -> Iterator[str]:
        """Yields price, limit and warnings of each tier's jobs, and the highest total cost."""
        if not runs:
            return
        jobs = [(self._job(run), count) for run, count in runs]
        yield from (package.about for package in self._order.packages if package.about)
        tiers_by_warning: dict[str, list[str]] = {}
        for job, count in jobs:
            many, tier = "1 job" if count == 1 else f"{count} jobs, each", job.tier
            yield f"{tier.name}: {many} on {tier.machine} in {job.gcp.region}: {price_and_limit(tier)}"
            yield from (f"{tier.name}: {line}" for line in job.about)
            for line in job.warnings:
                tiers_by_warning.setdefault(line, []).append(tier.name)
        yield from (f"warning: {', '.join(tiers)}: {line}" for line, tiers in tiers_by_warning.items())
        asked = self._order.asked
        yield from memory_lines([run for run, _ in runs], plan=asked.plan, force=asked.force)
        yield from cost_lines(job for job, _ in jobs)
        most = sum(count * (job.tier.most_usd or 0.0) for job, count in jobs)
        unknown = sum(count for job, count in jobs if job.tier.most_usd is None)
        more = f", and {unknown} without a known price" if unknown else ""
        limit = "" if asked.max_cost else "; --max_cost=USD limits each of them"
        yield f"all jobs together: {most:.2f} USD at most{more}{limit}"
        if self._dry_run:
            yield from self._question(jobs).lines()

    def _question(self, jobs: Sequence[tuple[Job, int]]) -> CostQuestion:
        counts = [(job.tier, count) for job, count in jobs]
        return cost_question(counts, planned_usd(job for job, _ in jobs), self._order.asked, each=True)

    def preflight(self, runs: Sequence[tuple[Work, Path]]) -> None:
        """Asks about much money for the jobs that are not sent yet; checks login, project, buckets and data once."""
        if not runs:
            return
        jobs = {name: self._job(run) for name, run in {run.tier.name: run for run, _ in runs}.items()}
        with api_errors(self._gcp):
            new = Counter(run.tier.name for run, job_dir in runs if not self._earlier(find_in(job_dir)))
        if new:
            self._question([(jobs[name], count) for name, count in new.items()]).agree()
        checks = {(job.output.split("/")[2], job.image.uri, *job.work.inputs.values()): job for job in jobs.values()}
        for bucket in {bucket for bucket, *_ in checks}:
            connect().list(Address(bucket, ""), most=1)  # no job runs if its results could not be read
        backend = self._open(self._gcp.project, self._gcp.region)
        with api_errors(self._gcp):
            retried(lambda: backend.jobs("none"), self._clock)
            for job in checks.values():
                check_resources(job)

    def run(self, run: Work, job_dir: Path) -> int:
        """Submits the run's job, or finds it again, follows it and fetches its results; returns its exit code."""
        job_dir.mkdir(parents=True, exist_ok=True)
        try:
            with open(f"{job_dir}.log", "a", encoding="utf-8", buffering=1) as log:
                sent, print_line = find_in(job_dir), partial(print, file=log)
                name = self._earlier(sent)
                if not (sent and name):
                    sent, name = self._send(run, job_dir, sent)
                last = sent.attempts[-1]
                backend, gcp = self._open(last.project, last.region), GcpConfig(last.project, last.region, "")
                try:
                    status = follow_job(backend, name, gcp, self._clock, print_line, created=True)
                except Stopped:
                    say(f"{name} is still running; cancel it: python -m deploy cancel {name}")
                    raise
                with suppress(LookupError, UserError):  # the comparison does not need this folder's records
                    record, attempt = find_attempt(sent.submission)
                    record.record_status(attempt, status, self._clock.now())
                _fetch(last.output, status, job_dir, print_line)
                return exit_code(status)
        except Stopped:
            return INTERRUPTED
        except ApiError as error:
            raise (PlatformFault if error.transient else UserError)(describe_error(error, self._gcp)) from None

    def stop(self) -> None:
        """Stops waiting; the jobs continue."""
        self._stopped.set()

    def _earlier(self, sent: Submission | None) -> str:
        """Returns the name of a job that was sent before and runs or has succeeded; "" if a new one is needed."""
        if sent is None:
            return ""
        backend = self._open(sent.attempts[-1].project, sent.attempts[-1].region)
        # Its doubles are cancelled; one that ended itself goes on in another job.
        jobs = retried(partial(backend.jobs, sent.label), self._clock)
        status = newest_original(jobs, backend, self._clock)
        status = settled(status, self._clock.now()) if status else None
        return status.name if status and (not status.over or status.state == "SUCCEEDED") else ""

    def _job(self, run: Work, submission: str = "check", job_dir: str = "") -> Job:
        order = with_limits(run, dataclasses.replace(self._order, submission=submission))
        return job_of(dataclasses.replace(run, job_dir=job_dir) if job_dir else run, self._gcp, order)

    def _send(self, run: Work, job_dir: Path, previous: Submission | None) -> tuple[Submission, str]:
        """Submits a new job with the output of the previous one; returns it and its name."""
        (job_dir / RESULT).unlink(missing_ok=True)  # of the previous attempt: the result in the bucket counts
        with self._uploading:  # the first run builds and uploads; the others find the packages
            self._check_stop()  # the lock may have taken minutes
            submission = next(self._submissions)
            job = self._job(run, submission, previous.attempts[-1].output if previous else "")
            upload_packages(job.packages, job.gcp.bucket)
        self._check_stop()
        price = job.tier.price_per_hour
        sent = Submission(submission, [Attempt(job.tier.name, job.gcp.project, job.gcp.region, price, job.output)])
        sent.write(job_dir)
        try:
            return sent, submit_job(job, Submission(submission), self._open, self._clock)
        except StateUnknownError:
            raise  # the same command finds the job again
        except ApiError as error:
            record_failure(job_dir, f"not submitted: {describe_error(error, job.gcp)}")
            raise

    def _open(self, project: str, region: str) -> Platform:
        return self._session.open(self._order.asked.backend, project, region)

    def _check_stop(self) -> None:
        if self._stopped.is_set():
            raise Stopped

    def _sleep(self, seconds: float) -> None:
        clock = self._session.clock
        until = clock.now() + seconds
        self._check_stop()
        while (left := until - clock.now()) > 0:
            clock.sleep(min(left, STOP_DELAY_S))
            self._check_stop()


def _fetch(output: str, status: JobStatus, job_dir: Path, print_line: Log) -> None:
    """Copies what a report reads to `job_dir`, and adds the error of a failed job if the trainer wrote none.

    result.json is written last, because it marks the copy as complete.
    """
    try:
        folder = fetched(output, "output")
        shutil.copytree(folder, job_dir, ignore=shutil.ignore_patterns(RESULT), dirs_exist_ok=True)
        if (folder / RESULT).is_file():
            write_whole(job_dir / RESULT, (folder / RESULT).read_bytes())
    except UserError as error:
        if status.state == "SUCCEEDED":
            raise
        print_line(f"not fetched: {error}")
    if status.state != "SUCCEEDED":
        print_line(describe_failure(status))
        record_failure(job_dir, describe_failure(status) or status.state)
    elif not (job_dir / RESULT).is_file():
        raise UserError(f"{output} has no result.json, though the job succeeded: remove {job_dir} to run it again")
