"""Defines what this package and Vertex AI exchange: requests that create jobs, their states, and
log lines."""

import dataclasses
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from deploy.platform.api_error import ApiError, unreadable_as_lost
from deploy.tiers.spec_rules import machine_of
from deploy.tiers.tier import DEFAULT_TIMEOUT_S, PRICE_LABEL, TierFacts
from trainer.base.limit_watch import LIMITS
from trainer.base.log import duration

FINAL_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED"})
# Our state of a job that ended at one of its limits: itself, which Vertex AI calls SUCCEEDED, or by
# its timeout, which Vertex AI calls EXPIRED, as it does a job that got no machines.
STOPPED = "STOPPED"
STATES = (
    "QUEUED",
    "PENDING",
    "RUNNING",
    "CANCELLING",
    "PAUSED",
    "UPDATING",
    *sorted(FINAL_STATES),
    STOPPED,
)


@dataclass(frozen=True)
class JobStatus:
    """Holds a job's status.

    `state` has no prefix JOB_STATE_; times are in seconds since 1970, None until they come.
    """

    name: str
    display_name: str
    state: str
    created: float | None
    started: float | None
    ended: float | None
    error: str
    labels: Mapping[str, str]
    strategy: str = ""  # its scheduling strategy
    timeout_s: float = DEFAULT_TIMEOUT_S
    output: str = ""  # its job directory, gs://…
    checks: bool = False  # it only checks the GPUs of its tier, and trains nothing
    limited: bool = False  # it may end itself at a limit, since its spec has LIMITS
    # the links of --web_access, by worker
    shells: Mapping[str, str] = dataclasses.field(default_factory=dict)
    machine: str = ""  # the number of machines, and the chief's type and accelerators

    def __repr__(self) -> str:
        return f"<{self.state} {self.display_name}: {self.name}>"

    @property
    def over(self) -> bool:
        """Returns whether the state is final."""
        return self.state in FINAL_STATES or self.state == STOPPED

    @property
    def usd_per_hour(self) -> float | None:
        """Returns the price in the job's label; None without one."""
        with suppress(ValueError):
            return float(self.labels.get(PRICE_LABEL, "").replace("-", "."))
        return None

    def seconds(self, now: float) -> float:
        """Returns the seconds for which the job's machines have run."""
        return max((self.ended or now) - self.started, 0.0) if self.started else 0.0

    def usd(self, now: float) -> float | None:
        """Returns what the job's machines have cost so far; None without a price."""
        price = self.usd_per_hour
        return None if price is None else self.seconds(now) / 3600 * price


@dataclass(frozen=True)
class WatchLine:
    """Holds a line that `watch` prints: what changed about the job at `time` or, with a `worker`, a
    line of its log."""

    time: float  # seconds since 1970
    text: str
    worker: str = ""
    severity: str = ""  # only of log lines

    def __str__(self) -> str:
        severity = f"{self.severity}: " if self.severity in ("WARNING", "ERROR", "CRITICAL") else ""
        time = datetime.fromtimestamp(self.time, UTC).strftime("%H:%M:%S UTC")
        return f"{time}  {f'{self.worker}  ' * bool(self.severity)}{severity}{self.text}"


class CustomJob(NamedTuple):
    """Holds the request that creates a job. `spec` is a CustomJobSpec."""

    display_name: str
    spec: Mapping[str, Any]
    labels: Mapping[str, str]
    kms_key: str = ""  # projects/P/locations/R/keyRings/…/cryptoKeys/…


def parse_job(job: Mapping[str, Any]) -> JobStatus:
    """Converts the JSON of a CustomJob:
    https://docs.cloud.google.com/gemini-enterprise-agent-platform/reference/rest

    Raises ApiError, as if the response were lost, if it is not a CustomJob.
    """
    with unreadable_as_lost():
        spec = job.get("jobSpec", {})
        scheduling = spec.get("scheduling", {})
        # Its machines, in words: their number, and those of the chief.
        pools = spec.get("workerPoolSpecs", [])
        count = sum(int(pool.get("replicaCount", 1)) for pool in pools)
        chief = [*map(machine_of, pools), ("", "", 0)][0]
        machine = TierFacts("", *chief, count).machine
        # Its state, and the error: a job that expires is ours if it ran, else it got no machines.
        timeout = str(scheduling.get("timeout", "0s"))
        timeout_s = float(timeout.removesuffix("s")) or DEFAULT_TIMEOUT_S
        state = job.get("state", "JOB_STATE_UNSPECIFIED").removeprefix("JOB_STATE_")
        error = job.get("error", {}).get("message", "")
        if state == "EXPIRED" and job.get("startTime"):
            state = STOPPED
            limit = duration(timeout_s, hours_always=True)
            message = f" ({error})" if error else ""
            cause = "the most that its plan, --max_cost or --timeout allows"
            error = f"it ran for {limit}, {cause}{message}"
        elif state == "EXPIRED":
            error = error or "it got no machines while it waited (--max_wait)"
        return JobStatus(
            created_name(job["name"]),
            job.get("displayName", ""),
            state,
            parse_time(job.get("createTime", "")),
            parse_time(job.get("startTime", "")),
            parse_time(job.get("endTime", "")),
            error,
            job.get("labels", {}),
            scheduling.get("strategy", ""),
            timeout_s,
            spec.get("baseOutputDirectory", {}).get("outputUriPrefix", "").rstrip("/"),
            "'--on_gpus'" in str(spec),
            f"'{LIMITS}'" in str(spec),
            dict(job.get("webAccessUris", {})),
            machine,
        )


def console_page(name: str, project: str) -> str:
    """Returns the URL of a job in Google's console. `name`: its resource name."""
    _, _, _, region, _, number = name.split("/")
    return f"https://console.cloud.google.com/vertex-ai/locations/{region}/training/{number}?project={project}"


def created_name(name: Any) -> str:
    """Returns `name` if it is a job's resource name.

    Raises ApiError otherwise, as if the response were lost.
    """
    if not re.search(r"/customJobs/\d+$", str(name)):
        raise ApiError(0, "the response does not name the job")
    return str(name)


def parse_time(time: str) -> float | None:
    """Converts a time of RFC 3339 to seconds since 1970, to a microsecond; "" to None."""
    return datetime.fromisoformat(time).timestamp() if time else None
