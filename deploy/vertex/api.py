"""What every backend does: submit a job, tell its state, give its logs, list ours, cancel, store a package.

A backend belongs to one project and region. It makes each call once: its caller decides when to ask again.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

LABEL = "submission"  # a label of every job of ours; its value finds the job of one submission
PRICE_LABEL = "usd-per-hour"
ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED"})


class ApiError(Exception):
    """A call failed. `code` is the HTTP status, or 0 where no answer came; `login` the command that mends a 401."""

    def __init__(self, code: int, message: str, login: str = "gcloud auth login") -> None:
        super().__init__(" ".join(message.split()))
        self.code, self.login = code, login

    @property
    def quota(self) -> bool:
        """Whether a quota of machines is used up, which asking again does not mend; calls a minute are none of it."""
        said = str(self).lower()
        rate = re.search(r"per (\d+ )?(minute|second)|rate_?limit_?exceeded", said)
        return self.code == 429 and "quota" in said and not rate

    @property
    def transient(self) -> bool:
        """Whether asking again may help."""
        return (self.code in (0, 408, 429) and not self.quota) or self.code >= 500

    @property
    def may_have_worked(self) -> bool:
        """Whether the call may have done its work although it failed."""
        return self.code == 0 or self.code >= 500


class Broken(ApiError):
    """The program that makes the calls fails here, whatever it is asked; the text says what to do."""

    @property
    def transient(self) -> bool:
        """Asking again does not mend it."""
        return False


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """A job as its service tells it. `state` is without JOB_STATE_; times are in seconds since 1970, None before."""

    name: str
    display_name: str
    state: str
    created: float | None
    started: float | None
    ended: float | None
    error: str
    labels: Mapping[str, str]

    @property
    def over(self) -> bool:
        """Whether the state is final."""
        return self.state in ENDED


@dataclasses.dataclass(frozen=True)
class LogEntry:
    """A line of a worker's log. `time` is RFC 3339, `worker` as workerpool0-0."""

    id: str
    time: str
    worker: str
    severity: str
    text: str


@dataclasses.dataclass(frozen=True)
class CustomJob:
    """What is sent: a CustomJob."""

    display_name: str
    spec: Mapping[str, Any]
    labels: Mapping[str, str]


class Backend(Protocol):
    """Every method may raise ApiError. Jobs are named projects/P/locations/R/customJobs/ID."""

    def submit(self, request: CustomJob) -> str:
        """Makes the job and returns its name; sends at most one request that makes one."""

    def state(self, name: str) -> JobStatus:
        """The job as it is now."""

    def logs(self, name: str, since: str) -> Sequence[LogEntry]:
        """Log entries of all workers from the time `since` (RFC 3339, or empty: all), oldest first."""

    def jobs(self, label: str = "") -> Sequence[JobStatus]:
        """Jobs of ours, or those whose LABEL is `label`."""

    def cancel(self, name: str) -> None:
        """Asks the job to stop; its state says when it has."""

    def upload(self, file: Path, uri: str) -> None:
        """Stores `file` unless it is there already, with its checksum compared."""

    def holds(self, address: str) -> bool:
        """Whether an object lies at gs://BUCKET/… or below it; true where that may not be read."""

    def location(self, bucket: str) -> str:
        """Where the bucket gs://NAME lies, as US or EUROPE-WEST4; empty where that may not be read."""


def open_backend(kind: str, project: str, region: str) -> Backend:
    """The backend `gcloud` or `sdk`; only the one asked for is imported."""
    if kind == "sdk":
        from deploy.vertex.sdk import Sdk

        return Sdk(project, region)
    from deploy.vertex.gcloud import Gcloud

    return Gcloud(project, region)


def read_status(job: Mapping[str, Any]) -> JobStatus:
    """The JSON of a CustomJob, https://docs.cloud.google.com/gemini-enterprise-agent-platform/reference/rest"""
    return JobStatus(
        job["name"],
        job.get("displayName", ""),
        job.get("state", "JOB_STATE_UNSPECIFIED").removeprefix("JOB_STATE_"),
        seconds(job.get("createTime", "")),
        seconds(job.get("startTime", "")),
        seconds(job.get("endTime", "")),
        job.get("error", {}).get("message", ""),
        job.get("labels", {}),
    )


def read_entry(entry: Mapping[str, Any]) -> LogEntry:
    """The JSON of a LogEntry, https://cloud.google.com/logging/docs/reference/v2/rest/v2/LogEntry"""
    payload = entry.get("jsonPayload", {})
    text = entry.get("textPayload") or payload.get("message") or str(payload or "")
    worker = entry.get("resource", {}).get("labels", {}).get("task_name", "")
    return LogEntry(
        entry.get("insertId", ""), entry["timestamp"], worker, entry.get("severity", "DEFAULT"), text.rstrip()
    )


def log_filter(name: str, since: str) -> str:
    """The filter of Cloud Logging for a job's entries."""
    wanted = f'resource.type="ml_job" AND resource.labels.job_id="{name.rsplit("/", 1)[-1]}"'
    return f'{wanted} AND timestamp>="{since}"' if since else wanted


def seconds(time: str) -> float | None:
    """RFC 3339, with up to nine digits of a second, as seconds since 1970."""
    if not time:
        return None
    whole, _, fraction = time.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
