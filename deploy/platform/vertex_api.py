"""Defines what this package and Vertex AI exchange: job requests, states, log lines, and the error of a failed call."""

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from deploy.base.console import tell
from deploy.tiers.spec_rules import machine_of
from deploy.tiers.tier import DEFAULT_TIMEOUT_S
from trainer.base.errors import reason
from trainer.base.limit_watch import LIMITS

# Matches the service's error for a job for which there are no machines, or no quota.
STOCKED_OUT = re.compile(
    r"stock-?out|resources are insufficient|insufficient .*(capacity|resources)|quota|resource_exhausted", re.IGNORECASE
)
FINAL_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED"})
STOPPED = "STOPPED"  # our state of a job that ended itself at one of its limits, which Vertex AI calls SUCCEEDED
STATES = ("QUEUED", "PENDING", "RUNNING", "CANCELLING", "PAUSED", "UPDATING", *sorted(FINAL_STATES))


class ApiError(Exception):
    """Reports a failed call. `code`: its HTTP status, 0 without a response; `login`: the command that fixes a 401.

    `sent`: False if the request certainly did not reach the service.
    """

    final = False  # True if another tier or region does not help; the message then says what to do

    def __init__(self, code: int, message: str, login: str = "gcloud auth login", *, sent: bool = True) -> None:
        super().__init__(" ".join(message.split()))
        self.code, self.login, self.sent = code, login, sent
        self._service_fault = code >= 500 and code != 501  # 501: the service lacks this method

    @property
    def quota(self) -> bool:
        """Returns whether a machine quota is exhausted, which a retry does not fix; rate limits do not count."""
        text = str(self).lower()
        rate_limit = re.search(r"per (\d+ )?(minute|second)|rate_?limit_?exceeded", text)
        return not self.final and self.code == 429 and "quota" in text and not rate_limit

    @property
    def unavailable(self) -> bool:
        """Returns whether this region lacks quota or machines for the job, which another region or tier may have."""
        missing = re.search(
            r"(machine|accelerator|gpu).* (not|un)\W?(supported|available|offered|exist|found)\b"
            r"|not (supported|available|offered) in (the )?(region|location|zone)",
            str(self), re.IGNORECASE,
        )  # fmt: skip
        return self.quota or (self.code in (400, 404) and missing is not None and not self.final)

    @property
    def transient(self) -> bool:
        """Returns whether a retry may help."""
        return self._service_fault or (self.code in (0, 408, 429) and not self.quota)

    @property
    def may_have_succeeded(self) -> bool:
        """Returns whether the service may have carried out the request although the call failed."""
        return self.sent and (self.code == 0 or self._service_fault)


class BrokenClientError(ApiError):
    """Reports a fault of this machine's client program or network that every call would meet; states the fix."""

    final, transient = True, False


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """Holds a job's status. `state` has no prefix JOB_STATE_; times are in seconds since 1970, None until they come."""

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
    shells: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the links of --web_access, by worker
    machine: str = ""  # the number of machines, and the chief's type and accelerators

    def __repr__(self) -> str:
        return f"<{self.state} {self.display_name}: {self.name}>"

    @property
    def over(self) -> bool:
        """Returns whether the state is final."""
        return self.state in FINAL_STATES or self.state == STOPPED


@dataclasses.dataclass(frozen=True)
class WatchLine:
    """Holds a line that `watch` prints: what changed about the job at `time` or, with a `worker`, a line of its log."""

    time: float  # seconds since 1970
    text: str
    worker: str = ""
    severity: str = ""  # only of log lines

    def __str__(self) -> str:
        severity = f"{self.severity}: " if self.severity in ("WARNING", "ERROR", "CRITICAL") else ""
        time = datetime.fromtimestamp(self.time, UTC).strftime("%H:%M:%S UTC")
        return f"{time}  {f'{self.worker}  ' * bool(self.severity)}{severity}{self.text}"


@dataclasses.dataclass(frozen=True)
class CustomJob:
    """Holds the request that creates a job. `spec` is a CustomJobSpec."""

    display_name: str
    spec: Mapping[str, Any]
    labels: Mapping[str, str]
    kms_key: str = ""  # projects/P/locations/R/keyRings/…/cryptoKeys/…


def parse_job(job: Mapping[str, Any]) -> JobStatus:
    """Converts the JSON of a CustomJob: https://docs.cloud.google.com/gemini-enterprise-agent-platform/reference/rest

    Raises ApiError, as if the response were lost, if it is not a CustomJob.
    """
    with unreadable_as_lost():
        spec = job.get("jobSpec", {})
        scheduling = spec.get("scheduling", {})
        pools = [(machine_of(pool), int(pool.get("replicaCount", 1))) for pool in spec.get("workerPoolSpecs", [])]
        count = sum(replicas for _, replicas in pools)
        type_, accelerator, accelerators = pools[0][0] if pools else ("", "", 0)
        machine = f"{f'{count} x ' * (count > 1)}{type_}{f' with {accelerators} {accelerator}' * bool(accelerators)}"
        no_machines = job.get("state") == "JOB_STATE_EXPIRED" and not job.get("startTime")
        return JobStatus(
            created_name(job["name"]),
            job.get("displayName", ""),
            job.get("state", "JOB_STATE_UNSPECIFIED").removeprefix("JOB_STATE_"),
            parse_time(job.get("createTime", "")),
            parse_time(job.get("startTime", "")),
            parse_time(job.get("endTime", "")),
            job.get("error", {}).get("message", "") or "it got no machines while it waited (--max_wait)" * no_machines,
            job.get("labels", {}),
            scheduling.get("strategy", ""),
            float(str(scheduling.get("timeout", "0s")).removesuffix("s")) or DEFAULT_TIMEOUT_S,
            spec.get("baseOutputDirectory", {}).get("outputUriPrefix", "").rstrip("/"),
            "'--on_gpus'" in str(spec),
            f"'{LIMITS}'" in str(spec),
            dict(job.get("webAccessUris", {})),
            machine,
        )  # fmt: skip


@contextlib.contextmanager
def unreadable_as_lost(of_parser: type[Exception] = ValueError) -> Iterator[None]:
    """Raises ApiError, as if the response were lost, if the block cannot parse it.

    `of_parser`: an exception of the parser in use, which is converted like ValueError, KeyError and the like.
    """
    try:
        yield
    except (of_parser, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ApiError(0, f"the response is not one of this service: {reason(error)}") from None


def console_page(name: str, project: str) -> str:
    """Returns the URL of a job in Google's console. `name`: its resource name."""
    _, _, _, region, _, number = name.split("/")
    return f"https://console.cloud.google.com/vertex-ai/locations/{region}/training/{number}?project={project}"


def created_name(name: Any) -> str:
    """Returns `name` if it is a job's resource name. Raises ApiError otherwise, as if the response were lost."""
    if not re.search(r"/customJobs/\d+$", str(name)):
        raise ApiError(0, "the response does not name the job")
    return str(name)


def parse_time(time: str) -> float | None:
    """Converts a time of RFC 3339, with up to nine fractional digits, to seconds since 1970; "" to None."""
    if not time:
        return None
    whole, _, fraction = time.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


T = TypeVar("T")

RETRY_S = 1800.0  # how long a failing call is retried
LONGEST_WAIT_S = 60.0  # between two attempts
ANNOUNCED_WAIT_S = 30.0  # the first wait of at least this length is announced
TELL_S = 10.0  # between two lines on what a submission waits for


@dataclasses.dataclass(frozen=True)
class Clock:
    """Provides the time in seconds since 1970, and a sleep in seconds; tests replace both."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


def backoff(first: float = 1.0) -> Iterator[float]:
    """Yields the seconds to wait between attempts, without end, as exponential backoff.

    https://cloud.google.com/storage/docs/retry-strategy
    """
    wait = first
    while True:
        yield wait
        wait = min(2 * wait, LONGEST_WAIT_S)


def retried(call: Callable[[], T], clock: Clock, retry_s: float = RETRY_S) -> T:
    """Returns the result of `call`, which is repeated after transient errors for `retry_s` seconds.

    The first long wait is announced in a line on stderr. Raises an ApiError that is not transient at once, and the last
    transient one when the time is over.
    """
    deadline = clock.now() + retry_s
    for wait in backoff():
        try:
            return call()
        except ApiError as error:
            if not error.transient or clock.now() + wait > deadline:
                raise
            if ANNOUNCED_WAIT_S <= wait < LONGEST_WAIT_S:  # 32 s is the only wait between the two
                end = time.strftime("%H:%M UTC", time.gmtime(deadline))
                tell(f"{error} ({error.code or 'no response'}): retrying until {end}; Ctrl-C stops")
        clock.sleep(wait)
    raise AssertionError("backoff never ends")
