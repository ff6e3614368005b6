"""Defines the contract between this package and Vertex AI: the protocol `Backend`, its data classes and its error."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from deploy.tiers.spec_changes import LABEL
from deploy.tiers.tier import DEFAULT_TIMEOUT_S
from trainer.base.errors import reason

T = TypeVar("T")
STUDY_LABEL = "study-"  # begins the label of a submission that is a study, not a single job
# What the service writes of a job for which there are no machines, or no quota.
STOCKED_OUT = re.compile(
    r"stock-?out|resources are insufficient|insufficient .*(capacity|resources)|quota|resource_exhausted", re.IGNORECASE
)
# What it writes of a machine or accelerator that a region does not have.
_NOT_HERE = re.compile(
    r"(machine|accelerator|gpu).* (not|un)\W?(supported|available|offered|exist|found)\b"
    r"|not (supported|available|offered) in (the )?(region|location|zone)",
    re.IGNORECASE,
)
FINAL_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED"})


class ApiError(Exception):
    """Reports a failed call. `code`: HTTP status, 0 without a response; `login`: command that fixes a 401.

    `sent`: False if the request certainly did not reach the service.
    """

    def __init__(self, code: int, message: str, login: str = "gcloud auth login", *, sent: bool = True) -> None:
        super().__init__(" ".join(message.split()))
        self.code, self.login, self.sent = code, login, sent

    @property
    def quota(self) -> bool:
        """Returns whether a machine quota is exhausted, which a retry does not fix; rate limits do not count."""
        text = str(self).lower()
        rate_limit = re.search(r"per (\d+ )?(minute|second)|rate_?limit_?exceeded", text)
        return self.code == 429 and "quota" in text and not rate_limit

    @property
    def unavailable(self) -> bool:
        """Returns whether this region lacks quota or machines for the job, which another region or tier may have."""
        return self.quota or (self.code in (400, 404) and _NOT_HERE.search(str(self)) is not None)

    @property
    def transient(self) -> bool:
        """Returns whether a retry may help."""
        return (self.code in (0, 408, 429) and not self.quota) or self._fault_of_the_service

    @property
    def may_have_succeeded(self) -> bool:
        """Returns whether the service may have carried out the request although the call failed."""
        return self.sent and (self.code == 0 or self._fault_of_the_service)

    @property
    def _fault_of_the_service(self) -> bool:
        return self.code >= 500 and self.code != 501  # 501: the service does not have this method


class BrokenClientError(ApiError):
    """Reports that the client program or the network of this machine fails whatever the call; states the fix."""

    @property
    def transient(self) -> bool:
        """Returns False: a retry does not help."""
        return False


@dataclasses.dataclass(frozen=True)
class JobKind:
    """Names a kind of job: in gcloud's commands, in the API's addresses and, as its type, in the API's messages."""

    command: str
    collection: str
    message: str


CUSTOM = JobKind("custom-jobs", "customJobs", "custom_job")
TUNING = JobKind("hp-tuning-jobs", "hyperparameterTuningJobs", "hyperparameter_tuning_job")


def kind_of(name_or_label: str) -> JobKind:
    """Returns the kind of the job with this name, or this label of its submission."""
    return TUNING if name_or_label.startswith(STUDY_LABEL) or f"/{TUNING.collection}/" in name_or_label else CUSTOM


def kinds_of(label: str) -> tuple[JobKind, ...]:
    """Returns the kinds of jobs that may have this label; all without one."""
    return (kind_of(label),) if label else (CUSTOM, TUNING)


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """Holds a job's status. `state` is without JOB_STATE_; times are in seconds since 1970, None until they occur."""

    name: str
    display_name: str
    state: str
    created: float | None
    started: float | None
    ended: float | None
    error: str
    labels: Mapping[str, str]
    strategy: str = ""  # of scheduling
    timeout_s: float = DEFAULT_TIMEOUT_S
    output: str = ""  # its job directory, gs://…
    checks: bool = False  # the GPUs of its tier, and trains nothing

    @property
    def over(self) -> bool:
        """Returns whether the state is final."""
        return self.state in FINAL_STATES


@dataclasses.dataclass(frozen=True)
class LogEntry:
    """Holds a line of a worker's log. `time` is RFC 3339; `worker` looks like workerpool0-0."""

    id: str
    time: str
    worker: str
    severity: str
    text: str


@dataclasses.dataclass(frozen=True)
class CustomJob:
    """Holds the request that creates a job. `spec` is a CustomJobSpec.

    Of a study (`kind`) it holds the fields of a HyperparameterTuningJob: studySpec, trialJobSpec and counts.
    """

    display_name: str
    spec: Mapping[str, Any]
    labels: Mapping[str, str]
    kms_key: str = ""  # projects/P/locations/R/keyRings/…/cryptoKeys/…

    @property
    def kind(self) -> JobKind:
        """Returns the kind of the job, by its label."""
        return kind_of(self.labels.get(LABEL, ""))


class Backend(Protocol):
    """Represents Vertex AI, Cloud Logging and Cloud Storage for one project and region.

    Every method raises ApiError if a request fails, and UserError if its client is not installed. No method retries:
    callers retry with `deploy.vertex.retry.retried`, except `submit`, which `deploy.vertex.submission` repeats only
    after it has looked for the job. Jobs are named projects/P/locations/R/customJobs/ID, studies
    projects/P/locations/R/hyperparameterTuningJobs/ID; a study is a job, too.
    """

    def submit(self, request: CustomJob) -> str:
        """Creates the job and returns its name; sends at most one create request."""

    def state(self, name: str) -> JobStatus:
        """Returns the current status of the job; ApiError 404 if it does not exist."""

    def logs(self, name: str, since: str) -> Sequence[LogEntry]:
        """Returns the log entries of all workers since the time `since` (RFC 3339; empty: all), oldest first."""

    def jobs(self, label: str = "") -> Sequence[JobStatus]:
        """Returns all jobs that this package submitted, studies too, or only those with the value `label` of LABEL."""

    def trials(self, name: str) -> Sequence[Mapping[str, Any]]:
        """Returns the trials of a study as the API's JSON has them."""

    def cancel(self, name: str) -> None:
        """Requests cancellation and returns at once; `state` shows when the job is over."""

    def upload(self, file: Path, uri: str) -> None:
        """Uploads `file` with its checksum verified, unless the object already exists."""

    def read(self, uri: str) -> tuple[str, int] | None:
        """Returns text and generation of a small object; None if it does not exist."""

    def write(self, uri: str, text: str, generation: int) -> bool:
        """Replaces a small object of this generation, 0 for none; returns False if it has another one."""

    def delete(self, uri: str, generation: int) -> None:
        """Deletes an object of this generation; ApiError if it has another one."""

    def exists(self, address: str) -> bool:
        """Returns whether an object is at gs://BUCKET/… or below it; True if the account may not list the bucket."""

    def location(self, bucket: str) -> str:
        """Returns the location of gs://NAME, as US or EUROPE-WEST4; empty if the account may not read it."""

    def has_image(self, uri: str) -> bool:
        """Returns whether Artifact Registry has the image; True if it is elsewhere, or the account may not read it."""


def unless_forbidden(call: Callable[[], T], default: T) -> T:
    """Returns the result of `call`, or `default` after a 403: the job's account may have the permission."""
    try:
        return call()
    except ApiError as error:
        if error.code == 403:
            return default
        raise


def parse_job(job: Mapping[str, Any]) -> JobStatus:
    """Converts a CustomJob's JSON, https://docs.cloud.google.com/gemini-enterprise-agent-platform/reference/rest

    Raises ApiError, as for a lost response, if it is none.
    """
    with unreadable_as_lost():
        return _parse_job(job)


@contextlib.contextmanager
def unreadable_as_lost(of_parser: type[Exception] = ValueError) -> Iterator[None]:
    """Raises ApiError, as for a lost response, if a response cannot be parsed. `of_parser`: an error of the parser."""
    try:
        yield
    except (of_parser, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ApiError(0, f"the response is none of this service: {reason(error)}") from None


def created_name(name: Any) -> str:
    """Returns the name of a created job; ApiError, as for a lost response, if it is none."""
    if not re.search(rf"/({CUSTOM.collection}|{TUNING.collection})/\d+$", str(name)):
        raise ApiError(0, "the response does not name the job")
    return str(name)


def _parse_job(job: Mapping[str, Any]) -> JobStatus:
    spec = job.get("jobSpec", {})  # a study has none: timeout and output are those of each trial
    scheduling = spec.get("scheduling", {})
    return JobStatus(
        created_name(job["name"]),
        job.get("displayName", ""),
        job.get("state", "JOB_STATE_UNSPECIFIED").removeprefix("JOB_STATE_"),
        parse_time(job.get("createTime", "")),
        parse_time(job.get("startTime", "")),
        parse_time(job.get("endTime", "")),
        job.get("error", {}).get("message", ""),
        job.get("labels", {}),
        (scheduling or job.get("trialJobSpec", {}).get("scheduling", {})).get("strategy", ""),
        float(str(scheduling.get("timeout", "0s")).removesuffix("s")) or DEFAULT_TIMEOUT_S,
        spec.get("baseOutputDirectory", {}).get("outputUriPrefix", "").rstrip("/"),
        any("--on_gpus" in pool.get(task, {}).get("args", []) for pool in spec.get("workerPoolSpecs", [])
            for task in ("containerSpec", "pythonPackageSpec")),
    )  # fmt: skip


def parse_log_entry(entry: Mapping[str, Any]) -> LogEntry:
    """Converts a LogEntry's JSON, https://cloud.google.com/logging/docs/reference/v2/rest/v2/LogEntry"""
    payload = entry.get("jsonPayload", {})
    text = entry.get("textPayload") or payload.get("message") or str(payload or "")
    worker = entry.get("resource", {}).get("labels", {}).get("task_name", "")
    return LogEntry(
        entry.get("insertId", ""), str(entry["timestamp"]), worker, entry.get("severity", "DEFAULT"), text.rstrip()
    )


def label_filter(label: str) -> str:
    """Returns the filter of `Backend.jobs`."""
    return f"labels.{LABEL}={label}" if label else f"labels.{LABEL}:*"


def log_filter(name: str, since: str) -> str:
    """Returns the filter of `Backend.logs`."""
    job = f'resource.type="ml_job" AND resource.labels.job_id="{name.rsplit("/", 1)[-1]}"'
    return f'{job} AND timestamp>="{since}"' if since else job


def parse_time(time: str) -> float | None:
    """Converts RFC 3339, with up to nine digits of a second, to seconds since 1970; None for empty text."""
    if not time:
        return None
    whole, _, fraction = time.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
