"""The runs of a comparison on Vertex AI: each is a job, submitted as `deploy submit` does, followed and fetched.

What is sent is kept in JOB_DIR/vertex.json beforehand: the same command again finds the job, follows it where it still
runs, fetches it where it has succeeded, and submits it anew, into the same output, where it has not.
"""

import argparse
import dataclasses
import itertools
import json
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from deploy.cli.job_flags import new_submission, read_job
from deploy.report.collection import fetched
from deploy.spec.gcp_config import GcpConfig, read_gcp_config
from deploy.spec.job_spec import Job
from deploy.spec.tier import Tier, TierFacts
from deploy.vertex.api import ApiError, Backend, JobStatus
from deploy.vertex.costs import price_and_limit
from deploy.vertex.errors import Lost, exit_code, explained, failure, meaning
from deploy.vertex.history import Submission, find, note
from deploy.vertex.logs import Say, follow
from deploy.vertex.retry import Clock, retried
from deploy.vertex.session import BACKENDS, Session
from deploy.vertex.submission import attempt_label, check_buckets, create, ship
from trainer.errors import INTERRUPTED, PlatformFault, UserError
from trainer.reporting.json_files import read_json
from trainer.reporting.run_files import record_failure
from trainer.storage import Address, parse, write_whole
from trainer.storage.run_layout import RESULT

PIECE_S = 1.0  # how long a sleep may keep `stop` waiting


class _Stopped(Exception):
    """`stop` was called."""


@dataclasses.dataclass(frozen=True)
class _Sent:
    """Where the job of a run is, or was about to be, when it was sent; `output` is its job directory, gs://…"""

    project: str
    region: str
    submission: str
    output: str


class VertexRunner:
    """Runs `tiers`. `asked`: what `deploy.cli.job_flags.read_job` and `deploy.cli.target.add_backend` need."""

    name = "vertex"

    def __init__(self, tiers: Sequence[Tier], asked: argparse.Namespace, session: Session) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._asked, self._session, self._gcp = asked, session, read_gcp_config(asked, with_project=True)
        self._clock = Clock(session.clock.now, self._sleep)
        self._stopped, self._shipping = threading.Event(), threading.Lock()
        self._submissions = (f"{new_submission()}-{number}" for number in itertools.count(1))

    def check(self, tier: TierFacts, flags: Sequence[str]) -> None:
        """UserError for a job that `submit` would refuse, or whose output is that of every other run."""
        if self._tiers[tier.name].spec.get("baseOutputDirectory"):
            raise UserError(
                f"{tier.name}: its baseOutputDirectory would be the job directory of every run: drop it from the tier: "
                "each run has a folder of its own in --bucket"
            )
        self._job(tier, flags, "check")

    def costs(self, runs: Sequence[tuple[TierFacts, Sequence[str], int]]) -> Iterator[str]:
        """Price and limit of each tier's jobs, what may be a mistake in them, and what all may cost together."""
        most, unknown, warned = 0.0, 0, dict[str, list[str]]()
        for tier, flags, count in runs:
            job = self._job(tier, flags, "check")
            usd = job.tier.most_usd
            most, unknown = most + count * (usd or 0.0), unknown + count * (usd is None)
            jobs = "1 job" if count == 1 else f"{count} jobs, each"
            yield f"{tier.name}: {jobs} on {tier.machine} in {job.gcp.region}: {price_and_limit(job.tier)}"
            for line in job.warnings:
                warned.setdefault(line, []).append(tier.name)
        yield from (f"warning: {', '.join(tiers)}: {line}" for line, tiers in warned.items())
        if runs:
            more = f", and {unknown} without a known price" if unknown else ""
            limit = "" if self._asked.max_cost else "; --max_cost=USD limits each of them"
            yield f"all jobs together: {most:.2f} USD at most{more}{limit}"

    def preflight(self, tiers: Mapping[TierFacts, Sequence[str]]) -> None:
        """Proves, once for all runs, that both logins, project, region, buckets and data can be used."""
        from trainer.storage.gcs import connect

        jobs: dict[tuple[str, ...], Job] = {}  # of those that read and write alike one
        for tier, flags in tiers.items():
            job = self._job(tier, flags, "check")
            output = parse(job.output, "output")
            assert output is not None, "jobspec lets only gs:// addresses pass"
            alike = (output.bucket, *job.config.inputs.values())
            jobs[alike] = job
        for bucket in {bucket for bucket, *_ in jobs}:
            connect().list(Address(bucket, ""), most=1)  # who may not read the results should not pay for them
        if jobs:
            backend = self._open(self._gcp.project, self._gcp.region)
            with explained(self._gcp):
                retried(lambda: backend.jobs("none"), self._clock)
                for job in jobs.values():
                    check_buckets(job, backend, self._clock)

    def run(self, tier: TierFacts, flags: Sequence[str], job_dir: Path) -> int:
        """Waits for the job, fetches what it wrote, and returns the exit code that its state stands for."""
        job_dir.mkdir(parents=True, exist_ok=True)
        try:
            with open(f"{job_dir}.log", "a", encoding="utf-8", buffering=1) as log:
                return self._run(tier, flags, job_dir, lambda line: print(line, file=log))
        except _Stopped:
            return INTERRUPTED
        except ApiError as error:
            raise (PlatformFault if error.transient else UserError)(meaning(error, self._gcp)) from None

    def stop(self) -> None:
        """Ends the waiting; the jobs go on."""
        self._stopped.set()

    def _run(self, tier: TierFacts, flags: Sequence[str], job_dir: Path, say: Say) -> int:
        sent = _read(job_dir)
        found = self._find(sent) if sent else None
        if sent and found and (not found.over or found.state == "SUCCEEDED"):
            name = found.name
        else:
            sent, name = self._send(tier, flags, job_dir, sent)
        status = self._follow(sent, name, say)
        _fetch(sent, status, job_dir, say)
        return exit_code(status)

    def _job(self, tier: TierFacts, flags: Sequence[str], submission: str) -> Job:
        return read_job(self._asked, flags, self._gcp, self._tiers[tier.name], submission)

    def _find(self, sent: _Sent) -> JobStatus | None:
        """The job that was sent; None where it was not made."""
        backend = self._open(sent.project, sent.region)
        made = retried(lambda: backend.jobs(attempt_label(sent.submission)), self._clock)
        return min(made, key=lambda status: status.created or 0.0, default=None)

    def _send(self, tier: TierFacts, flags: Sequence[str], job_dir: Path, before: _Sent | None) -> tuple[_Sent, str]:
        """A new job, into the output of the one before, and its name."""
        self._check_stop()
        (job_dir / RESULT).unlink(missing_ok=True)  # of the attempt before: what lies in the bucket counts
        into = [f"--job_dir={before.output}"] if before else []
        with self._shipping:  # what one has built and sent, the others find
            self._check_stop()  # they may have waited here for minutes
            submission = next(self._submissions)
            job = self._job(tier, [*flags, *into], submission)
            backend = self._open(job.gcp.project, job.gcp.region)
            ship(job.packages, job.gcp.bucket, backend, self._clock)
        self._check_stop()
        sent = _Sent(job.gcp.project, job.gcp.region, submission, job.output)
        write_whole(job_dir / "vertex.json", json.dumps(dataclasses.asdict(sent), indent=2) + "\n")
        try:
            return sent, create(job, Submission(submission), backend, self._clock)
        except Lost:
            raise  # the same command looks for the job again
        except ApiError as error:
            record_failure(job_dir, f"not submitted: {meaning(error, job.gcp)}")
            raise

    def _follow(self, sent: _Sent, name: str, say: Say) -> JobStatus:
        backend, gcp = self._open(sent.project, sent.region), GcpConfig(sent.project, sent.region, "")
        try:
            status = follow(backend, name, gcp, self._clock, say)
        except _Stopped:
            print(f"{name} goes on; end it: python -m deploy cancel {name}", flush=True)
            raise
        with suppress(LookupError, UserError):  # the comparison does not need this folder's records
            note(*find(sent.submission), status, self._clock.now())
        return status

    def _open(self, project: str, region: str) -> Backend:
        return self._session.open(self._asked.backend or BACKENDS[0], project, region)

    def _check_stop(self) -> None:
        if self._stopped.is_set():
            raise _Stopped

    def _sleep(self, seconds: float) -> None:
        clock = self._session.clock
        until = clock.now() + seconds
        self._check_stop()
        while (left := until - clock.now()) > 0:
            clock.sleep(min(left, PIECE_S))
            self._check_stop()


def _read(job_dir: Path) -> _Sent | None:
    """What was sent before; UserError where that cannot be read any more."""
    file = job_dir / "vertex.json"
    if not file.exists():
        return None
    try:
        return _Sent(**read_json(file)[0])
    except TypeError:
        raise UserError(f"{file} is damaged: see `python -m deploy jobs` for what runs, then remove it") from None


def _fetch(sent: _Sent, status: JobStatus, job_dir: Path, say: Say) -> None:
    """Brings what a report reads into `job_dir`; why a job failed is kept there where the trainer did not say it.

    result.json comes last, for it says that all is there.
    """
    try:
        found = fetched(sent.output, "output")
        shutil.copytree(found, job_dir, ignore=shutil.ignore_patterns(RESULT), dirs_exist_ok=True)
        if (found / RESULT).is_file():
            write_whole(job_dir / RESULT, (found / RESULT).read_bytes())
    except UserError as error:
        if status.state == "SUCCEEDED":
            raise
        say(f"not fetched: {error}")
    if status.state != "SUCCEEDED":
        say(failure(status))
        record_failure(job_dir, failure(status) or status.state)
    elif not (job_dir / RESULT).is_file():
        raise UserError(f"{sent.output} has no result.json, though the job succeeded: remove {job_dir} to run it anew")
