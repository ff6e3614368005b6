"""Represents a job of Vertex AI for verbs and programs: its status, its end, its cancellation, its result and model."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TextIO

from deploy.job.creation import cancel_and_wait, cancel_duplicate, cancel_duplicates, look_for, originals
from deploy.job.following import PrintLine, show, watch_job, with_reason
from deploy.job.ledger import Attempt, Submission, find_attempt, find_elsewhere
from deploy.platform import buckets
from deploy.platform.api import STATES, JobStatus, console_page, retried
from deploy.platform.clients import BACKENDS, SESSION, Session
from deploy.platform.errors import StateUnknownError, api_errors, exit_code
from deploy.platform.rest import Platform
from deploy.report.plots import axes
from deploy.report.text_tables import html_table
from deploy.tiers.gcp_config import (
    GcpConfig,
    checked_region,
    needed_project,
    needed_region,
    read_project,
    read_region,
    regions_in,
)
from deploy.tiers.options import Value, option, read_texts, texts_of
from deploy.tiers.output import printed_on
from deploy.tiers.tier import LABEL
from trainer.base.errors import INTERRUPTED, UserError
from trainer.base.run_files.records import MODEL, RESULT, STATS, mapping, number, parse_stats, read_stats
from trainer.base.settings.fields import whole
from trainer.base.storage import expanded, parse

KERAS_FILE = "model.keras"


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Holds what a run left in result.json: how it ended, its steps, its seconds, and its last losses and metrics.

    `content`: the whole file; `place`: the job directory.
    """

    state: str
    steps: int
    wall_seconds: float | None
    metrics: Mapping[str, float]
    content: Mapping[str, Any] = dataclasses.field(repr=False)
    place: str

    @property
    def history(self) -> dict[str, list[float | None]]:
        """Returns what Keras's `fit` returns as History.history: by name, the value of each epoch."""
        if parse(self.place, "run"):
            entries = parse_stats(buckets.read(f"{self.place}/{STATS}")[0])
        else:
            entries = read_stats(expanded(self.place))[0]
        history: dict[str, list[float | None]] = {}
        for entry in entries:
            if entry["kind"] == "epoch":  # with its evaluation
                for name, value in {**mapping(entry, "losses"), **mapping(entry, "metrics")}.items():
                    history.setdefault(name, []).append(value)
        return history

    def model(self) -> Any:
        """Returns the trained keras.Model, which Keras loads without the code of this package."""
        return load_model(self.place)

    def plot(self) -> Any:
        """Draws the losses of training and evaluation by epoch, and returns matplotlib's axes."""
        drawn = axes(self.place, "epoch")
        for name, values in self.history.items():
            if "loss" in name:
                drawn.plot(range(1, len(values) + 1), [math.nan if one is None else one for one in values], label=name)
        drawn.legend()
        return drawn

    @classmethod
    def read(cls, text: str, place: str) -> RunResult:
        """Returns the result in the text of a file at `place`. Raises UserError if there is none."""
        try:
            content = dict(json.loads(text))
        except (ValueError, TypeError):
            raise UserError(f"{place}: there is no result yet: wait for the end of the run") from None
        final = mapping(content, "final")
        values = {**mapping(final, "losses"), **mapping(final, "metrics")}
        metrics = {name: value for name, value in values.items() if number(value) is not None}
        seconds = number(content.get("wall_seconds"))
        return cls(str(content.get("state")), int(content.get("steps") or 0), seconds, metrics, content, place)


class VertexJob:
    """Represents a job of Vertex AI. Its methods raise UserError or PlatformFault, each in one line."""

    about: Sequence[str] = ()  # lines for people

    def __init__(
        self, name: str, gcp: GcpConfig, backend: str, session: Session, attempt: tuple[Submission, Attempt] | None
    ) -> None:
        self.name, self.gcp, self.session, self.attempt = name, gcp, session, attempt
        self.kind = backend or BACKENDS[0]

    def __repr__(self) -> str:
        return f"<job {self.name or 'that is not sent'}>"

    def _repr_html_(self) -> str:
        known = self.attempt[1] if self.attempt else None
        facts = {"tier": known.tier, "state, as last seen": known.state, "writes to": known.output} if known else {}
        page = html.escape(console_page(self.name, self.gcp.project)) if self.name else ""
        link = f'<p><a href="{page}">its page in Google\'s console</a></p>' if page else ""
        return html_table(("job", self.name or "not sent"), [*facts.items()], self.about) + link

    @property
    def backend(self) -> Platform:
        """Returns the client for the job's project and region."""
        return self.session.open(self.kind, self.gcp.project, self.gcp.region)

    @property
    def status(self) -> JobStatus:
        """Returns the job's state, times, error and labels as they are now."""
        with api_errors(self.gcp):
            return with_reason(retried(partial(self.backend.get, self.name), self.session.clock))

    @property
    def exit_code(self) -> int:
        """Returns the exit code by which `watch` tells how the job ended; 75 while it goes on."""
        status = self.status
        return exit_code(status) if status.over else INTERRUPTED

    def wait(self, stream: TextIO | None = None) -> JobStatus:
        """Returns the status at the job's end; its states and logs are printed on `stream`.

        Ctrl-C ends the wait, not the job, and returns the status of the job that goes on.
        """
        with printed_on(stream):
            return self.follow() or self.status

    def follow(self, print_line: PrintLine = show) -> JobStatus | None:
        """Waits as `wait` does, and prints as a command; returns None after Ctrl-C."""
        with api_errors(self.gcp):
            status = watch_job(self.backend, self.name, self.gcp, self.session.clock, print_line)
        if status:
            self._record(status)
        return status

    def cancel(self, stream: TextIO | None = None) -> JobStatus:
        """Cancels the job and the duplicates that a lost response made, and waits until it is over."""
        with printed_on(stream):
            return self.stop()

    def stop(self, confirm: Callable[[JobStatus], object] = lambda status: None) -> JobStatus:
        """Cancels as `cancel` does, and prints as a command. `confirm` raises UserError if the job is to go on."""
        backend, clock = self.backend, self.session.clock
        with api_errors(self.gcp):
            status = retried(partial(backend.get, self.name), clock)
            if not status.over:
                confirm(status)
                status = cancel_and_wait(backend, self.name, clock)
            label = status.labels.get(LABEL)
            jobs = retried(partial(backend.jobs, label), clock) if label else []
            by_name = originals(jobs)
            for job in jobs:  # older ones too
                if job.name != status.name and by_name[job.name] is by_name.get(status.name) and not job.over:
                    cancel_duplicate(job, status.name, backend, clock)
            self._record(status)
            if not status.over:
                raise StateUnknownError(0, f"{self.name}: still {status.state}: `python -m deploy watch` shows its end")
        return status

    @property
    def output(self) -> str:
        """Returns the job directory, gs://… Raises UserError for a job without one."""
        folder = self.attempt[1].output if self.attempt else self.status.output
        if not folder:
            raise UserError(f"{self.name}: it has no job directory")
        return folder

    @property
    def result(self) -> RunResult:
        """Returns what the run left in result.json. Raises UserError if there is none yet."""
        return RunResult.read(buckets.read(f"{self.output}/{RESULT}")[0], self.output)

    def model(self) -> Any:
        """Returns the trained keras.Model, which Keras loads from the bucket without the code of this package."""
        return load_model(self.output)

    def _record(self, status: JobStatus) -> None:
        """Stores the final status in this folder's record of the job, if there is one."""
        if self.attempt:
            record, attempt = self.attempt
            record.record_status(attempt, status, self.session.clock.now())


def load_model(job_dir: str) -> Any:
    """Returns the trained keras.Model of a job directory, local or gs://. Raises UserError if there is none."""
    import keras  # the one use of TensorFlow here, and only by a user's program

    from trainer.base.storage.staging import Staged

    address = parse(f"{job_dir}/{MODEL}", "model")
    folder = expanded(job_dir) / MODEL
    if address:
        folder = Staged(address, "model").fetch(lambda below: below == KERAS_FILE, quiet=True)
    if not (folder / KERAS_FILE).is_file():
        raise UserError(f"{job_dir}/{MODEL}/{KERAS_FILE}: there is no such file: a line of the run's log says why")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the optimizer's state, which the file has only with --save_optimizer
        return keras.saving.load_model(folder / KERAS_FILE, safe_mode=True)


def attach(
    job: str = "", project: str = "", region: str = "", backend: str = "", session: Session = SESSION
) -> VertexJob:
    """Returns a job by its name, number or submission; with no argument, the last one submitted from this folder.

    Raises UserError if it is neither given by its full name nor recorded in this folder.
    """
    try:
        attempt = find_attempt(job)
    except LookupError:
        attempt = None
    name = job
    if attempt:
        record, last = attempt
        if not last.job and last.state != "NOT SUBMITTED" and last.sent_at:  # it was interrupted: its label finds it
            with api_errors(GcpConfig(last.project, last.region, "")):
                opened = session.open(backend or BACKENDS[0], last.project, last.region)
                last.job = look_for(record.label, opened, session.clock, last.sent_at)
            record.write()
        if not last.job:
            raise UserError(
                f"submission {record.submission} has no job in {last.region} ({last.error or 'it was not requested'}): "
                "submit it again, or see `python -m deploy jobs`"
            )
        name = last.job
    full_name = re.fullmatch(r"projects/([^/]+)/locations/([^/]+)/customJobs/\d+", name)
    named = full_name[1] if full_name else ""
    if not project:  # a number instead of an ID is rejected by some services: then gcloud's project
        known = attempt[1].project if attempt else "" if named.isdecimal() else named
        project = known or read_project("") or named
    region = full_name[2] if full_name else read_region(region)
    forms = "projects/P/locations/R/customJobs/ID, or its number or submission with --project and --region"
    if not name:
        raise UserError(
            f"nothing was submitted from this folder: give the job's name, as {forms}; `python -m deploy jobs` lists "
            "all jobs"
        )
    if not project or not region or not (full_name or re.fullmatch(r"\d+|\d{8}-\d{6}-[\w-]+", name)):
        raise UserError(f"job {job!r} is not recorded in this folder: give its name, as {forms}")
    gcp = GcpConfig(project, region if full_name else checked_region(region), "")
    if not (full_name or name.isdecimal()):  # a submission from elsewhere
        with api_errors(gcp):
            opened = session.open(backend or BACKENDS[0], project, region)
            attempt = find_elsewhere(name, gcp, opened, session.clock)
        name = attempt[1].job
    if name.isdecimal():
        name = f"projects/{project}/locations/{region}/customJobs/{name}"
    return VertexJob(name, gcp, backend, session, attempt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobsOptions:
    """Holds what `jobs` may be asked for."""

    project: str = option("ID", "Google Cloud project (default: gcloud's)")
    region: str = option("NAME,NAME", "regions, as us-central1 (default: gcloud's ai/region)")
    backend: str = option("gcloud|sdk", "the client of Vertex AI", BACKENDS[0], choices=BACKENDS)
    state: str = option("STATE", "only those in this state, as RUNNING", "", str.upper, choices=STATES)
    limit: int = option("COUNT", "the newest of each region (default: %(default)s)", 50, whole(1, 10_000))


def jobs(
    region: str | Sequence[str] = "", project: str = "", state: str = "", limit: int = 50,
    stream: TextIO | None = None, session: Session = SESSION,
) -> list[JobStatus]:  # fmt: skip
    """Returns the `limit` newest jobs of each region, or those in one state, as "RUNNING", newest first.

    Also cancels duplicates, second jobs that a lost response created, and says so on `stream`.
    """
    values: dict[str, Value] = {"region": region, "project": project, "state": state, "limit": limit}
    asked = JobsOptions(**read_texts(JobsOptions, {name: texts_of(name, value) for name, value in values.items()}))
    with printed_on(stream):
        return [status for _, newest, _ in listed_jobs(asked, session) for status in newest]


def listed_jobs(asked: JobsOptions, session: Session) -> Iterator[tuple[str, list[JobStatus], int]]:
    """Yields each region with its jobs as `jobs` returns them, and how many there are in all."""
    project = needed_project(read_project(asked.project) or _of_last_submission("project"))
    for region in map(needed_region, regions_in(asked.region or read_region("") or _of_last_submission("region"))):
        with api_errors(GcpConfig(project, region, "")):
            backend = session.open(asked.backend, project, region)
            statuses = retried(backend.jobs, session.clock)
            groups: dict[str, list[JobStatus]] = {}  # of one submission's attempt each
            for status in statuses:
                groups.setdefault(status.labels.get(LABEL, status.name), []).append(status)
            for group in groups.values():
                cancel_duplicates(group, backend, session.clock)
        newest = sorted(statuses, key=lambda status: status.created or 0.0, reverse=True)
        newest = [status for status in newest if asked.state in ("", status.state)][: asked.limit]
        yield region, [*map(with_reason, newest)], len(statuses)


def _of_last_submission(name: str) -> str:
    """Returns the project or region of the last submission from this folder; empty without one."""
    with suppress(LookupError):
        return str(getattr(find_attempt("")[1], name))
    return ""
