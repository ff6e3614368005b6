"""Prints states and logs of a job until it ends, which gcloud's own stream-logs never does."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from deploy.base.console import say, tell
from deploy.job.cost import describe_run, format_duration
from deploy.job.ledger import watch_hint
from deploy.job.sending import cancel_duplicates
from deploy.platform import buckets
from deploy.platform.api_error import ApiError
from deploy.platform.errors import JobUnknown, describe_error, describe_failure, exit_code
from deploy.platform.rest import Platform
from deploy.platform.retries import Clock, retried
from deploy.platform.vertex_api import STOPPED, JobStatus, WatchLine
from deploy.tiers.tier import LABEL
from trainer.base.errors import FAULT, INTERRUPTED, PlatformFault, UserError, reason
from trainer.base.run_files.job_files import (
    BILLED,
    RESULT,
    RUN_INFO,
    STATS,
    StatsEntry,
    mapping,
    number,
    parse_stats,
    positive,
    whole,
)

SHUTDOWN_WAIT_S = 900.0  # for the machines to shut down
CANCEL_POLL_S = 5.0
LOG_POLL_S = 10.0
LATE_S = 60.0  # an entry may appear in the logs this long after its timestamp
LAST_LOGS_S = 15.0  # wait after the end for entries that have not arrived yet
LAST_RETRY_S = 30.0  # how long the last read of the logs is retried
LOOK_S = 60.0  # between two searches for duplicates


PrintLine = Callable[[WatchLine], object]


def show(line: WatchLine) -> None:
    """Prints a line as people read it."""
    say(str(line))


class LogTail:
    """Prints the log of all workers in chronological order, each entry once."""

    def __init__(self, backend: Platform, name: str, print_line: PrintLine) -> None:
        self._backend = backend
        self._name = name
        self._print = print_line
        self._newest = 0.0
        self._seen: dict[str, float] = {}
        self._last_error = ""  # the last one printed, so that it is printed once

    def print_new(self, retry_s: float = 0.0) -> None:
        """Prints new entries; after an error the next read returns the same entries."""
        try:
            logs = partial(self._backend.logs, self._name, max(self._newest - LATE_S, 0.0))
            entries = retried(logs, self._backend.clock, retry_s)
        except ApiError as error:
            text = describe_error(error, self._backend.gcp)
            if (retry_s or not error.transient) and text != self._last_error:
                self._last_error = text
                tell(f"no logs: {text}")
            return
        self._last_error = ""
        for identifier, line in entries:
            if identifier not in self._seen:
                self._seen[identifier] = line.time
                self._newest = max(self._newest, line.time)
                self._print(line)
        # Entries that no later read can return again are forgotten.
        oldest = self._newest - 2 * LATE_S
        self._seen = {key: time for key, time in self._seen.items() if time >= oldest}


REPORT_S = 300.0  # between lines about a job that waits for machines

# Why a job is PENDING, by its scheduling strategy; _STOCK for the others.
_REASONS = {
    "FLEX_START": (
        "FLEX_START waits until the machines are free, for the tier's maxWaitDuration at most"
    ),
    "SPOT": "there may be no spare machines in {region} now",
}
_STOCK = "after some minutes the likely reason is that {region} has no such machines free now"
_QUOTA = "waits for quota in {region}, which other jobs use: `python -m deploy jobs` lists yours"
_ADVICE = "; `submit TIER TIER --region=A,B --max_wait=1h` tries others by itself"


def watch_job(
    backend: Platform,
    name: str,
    print_line: PrintLine = show,
    *,
    created: bool = False,
    max_wait_s: float = math.inf,
) -> JobStatus | None:
    """Prints states and logs until the job is over, then how it ended; cancels its duplicates.

    Returns the status of the original, None if Ctrl-C ended the watch but not the job.

    `created`: the job is known to exist, so that a 404 only means that it cannot be seen yet;
        `max_wait_s`: a job that waits longer for machines is cancelled, and returned as EXPIRED.
        Raises JobUnknown if the state cannot be read for half an hour.
    """
    clock = backend.clock

    def read() -> JobStatus:
        try:
            return backend.get(name)
        except ApiError as error:
            raise ApiError(0, str(error)) if unseen and error.code == 404 else error from None

    tail = LogTail(backend, name, print_line)
    live = LiveLines(clock)
    shown_state = ""
    unseen = created
    look_at = 0.0
    began = clock.now()
    report_at = began + REPORT_S
    try:
        while True:
            try:
                status = retried(read, clock)
            except ApiError as error:
                if error.code == 404:  # the job does not exist
                    raise
                raise JobUnknown(
                    f"{describe_error(error, backend.gcp)}; the job may still be running;"
                    f" {watch_hint(name)}"
                ) from None
            unseen = False
            # also at the end: somebody else may have cancelled it as a duplicate
            if status.over or clock.now() >= look_at:
                look_at = clock.now() + LOOK_S
                label = status.labels.get(LABEL)
                by_name = dict[str, JobStatus]()
                with suppress(ApiError):
                    by_name = cancel_duplicates(backend.jobs(label) if label else [], backend)
                original = by_name.get(status.name, status).name  # itself, if that is not known
                if original != status.name:
                    print_line(WatchLine(clock.now(), f"follows {original}"))
                    name = original
                    tail = LogTail(backend, name, print_line)
                    continue
            now = clock.now()
            # If it had ended before, its log is complete.
            ended_before = not shown_state and now - (status.ended or 0.0) > LATE_S
            # Its new state and its progress; while it waits for machines, now and then why.
            news = [] if status.state == shown_state else [status.state]
            shown_state = status.state
            waits = status.state in ("QUEUED", "PENDING") and not status.started
            if waits and now >= report_at:
                report_at = now + REPORT_S
                waited = format_duration(max(0.0, now - min(began, status.created or began)))
                why = _QUOTA if status.state == "QUEUED" else _REASONS.get(status.strategy, _STOCK)
                advice = "" if max_wait_s < math.inf else _ADVICE
                news.append(
                    f"{status.state} for {waited}: {why.format(region=backend.gcp.region)}{advice}"
                )
            for line in (*news, *live.lines(status)):
                print_line(WatchLine(now, line))
            # It is over: the last lines of the log, and the bill.
            if status.over:
                with suppress(KeyboardInterrupt):  # which only skips the last lines of the log
                    clock.sleep(0.0 if ended_before else LAST_LOGS_S)
                    tail.print_new(LAST_RETRY_S)
                status = with_bill(status, clock.now())
                break
            if waits and now - began >= max_wait_s:  # EXPIRED, unless it ended otherwise meanwhile
                status = cancel_and_wait(backend, name)
                if not status.over:
                    raise JobUnknown(f"{name} is still being cancelled; {watch_hint(name)}")
                if status.state == "CANCELLED":
                    why = f"no machines within --max_wait={format_duration(max_wait_s)}: cancelled"
                    status = dataclasses.replace(status, state="EXPIRED", error=why)
                break
            tail.print_new()
            clock.sleep(LOG_POLL_S)
    except KeyboardInterrupt:
        say(f"no longer watched, and not cancelled; {watch_hint(name)}")
        return None
    ran, cost = describe_run(status, clock.now())
    say(f"{status.state} after {ran} on its machines{cost and f', about {cost}'}")
    if status.error:
        tell(f"error: {describe_failure(status)}")
    if (
        status.started
        and status.output
        and not status.checks
        and exit_code(status) in (INTERRUPTED, FAULT)
    ):
        say(
            "to continue from its last checkpoint, if it saved one: "
            f"{'the same command, elsewhere ' * (status.state == STOPPED)}"
            f"the same command with --job_dir={status.output}"
        )
    return status


_UNREADABLE = (UserError, PlatformFault, ValueError, AttributeError, TypeError)


def with_bill(status: JobStatus, now: float) -> JobStatus:
    """Returns the status of `with_stop_reason`; records an ended job's time and cost.

    The time is that from its start to its end, with all restarts; the cost is in USD, null without
    a price label. Nothing is recorded if the directory cannot be written.
    """
    with suppress(*_UNREADABLE):
        if status.output and status.over and status.started:
            text, generation = buckets.read_text(f"{status.output}/{BILLED}", quick=True)
            billed = json.loads(text or "{}").get("jobs", {})
            usd = status.usd(now)
            bill = {"seconds": round(status.seconds(now), 3), "usd": usd and round(usd, 4)}
            jobs = {**billed, status.name: bill}
            if jobs != billed:
                text = json.dumps({"jobs": jobs}, indent=2) + "\n"
                buckets.write(f"{status.output}/{BILLED}", text, generation, quick=True)
    return with_stop_reason(status)


def with_stop_reason(status: JobStatus) -> JobStatus:
    """Returns the status; STOPPED, with the reason, if result.json says the job ended itself."""
    with suppress(*_UNREADABLE):
        if status.state == "SUCCEEDED" and status.limited:
            result = json.loads(_read(status, RESULT))
            if result.get("state") == "stopped":
                error = str(result.get("error") or "a limit")
                return dataclasses.replace(status, state=STOPPED, error=error)
    return status


def _read(status: JobStatus, name: str) -> str:
    """Returns the text of a small file of the job directory; "{}" if there is none."""
    return buckets.read_text(f"{status.output}/{name}", quick=True)[0] or "{}"


LIVE_S = 60.0  # between two lines of progress
RECENT = 10  # reports from which the speed is computed


class LiveLines:
    """Makes lines of progress: step and cost, at most every LIVE_S, and each problem once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due = 0.0
        self._printed = set[str]()

    def lines(self, status: JobStatus) -> Iterator[str]:
        """Yields the lines that are due, and the link of an interactive shell once there is one."""
        news = {uri: f"a shell in {worker}: {uri}" for worker, uri in status.shells.items()}
        # Another program's job may have no job directory.
        if status.state == "RUNNING" and status.output and self._clock.now() >= self._due:
            self._due = self._clock.now() + LIVE_S
            try:
                entries = parse_stats(_read(status, STATS))
                about = json.loads(_read(status, RUN_INFO))
                progress = summary(entries, whole(about.get("total_steps")) or 0)
                money = ""
                if status.usd_per_hour is not None:
                    limit = status.usd_per_hour * status.timeout_s / 3600
                    money = f"; {status.usd(self._clock.now()):.2f} USD so far, {limit:.2f} at most"
                if progress:  # printed again for another step, not for another cost alone
                    news[progress] = f"{progress}{money}"
            # the last two: a damaged file
            except (UserError, PlatformFault, ValueError, AttributeError) as error:
                news[str(error)] = f"no progress: {reason(error)} ({status.output})"
        for subject, line in news.items():
            if subject not in self._printed:
                self._printed.add(subject)
                yield line


def summary(entries: Sequence[StatsEntry], total_steps: int) -> str:
    """Returns a run's progress in words, from its stats.jsonl; "" without a report."""
    reports = [entry for entry in entries if entry["kind"] == "report"]
    reports = [report for report in reports if number(report.get("seconds")) is not None]
    if not reports:
        return ""
    first = reports[-RECENT:][0]
    last = reports[-1]
    step = entries[-1]["step"]
    # This pace includes the evaluations and checkpoints between the reports.
    steps = last["step"] - first["step"]
    seconds = last["seconds"] - first["seconds"]
    pace = seconds / steps if steps > 0 and seconds > 0 else positive(last.get("step_seconds"))
    share = f" of {total_steps:,} ({step / total_steps:.0%})" if total_steps else ""
    remaining = ""
    if pace and total_steps:
        remaining = f"{format_duration(max(0, total_steps - step) * pace)} left"
    losses = []
    for name, value in itertools.islice(mapping(last, "losses").items(), 2):
        loss = number(value)
        if loss is not None:
            losses.append(f"{name} {loss:.4g}")
    return ", ".join(filter(None, [f"step {step:,}{share}", remaining, *losses]))


def cancel_and_wait(backend: Platform, name: str) -> JobStatus:
    """Cancels the job and returns its status when it is over, or after SHUTDOWN_WAIT_S."""
    clock = backend.clock
    retried(partial(backend.cancel, name), clock)
    began = clock.now()
    while True:
        status = retried(partial(backend.get, name), clock)
        if status.over or clock.now() - began > SHUTDOWN_WAIT_S:
            return status
        clock.sleep(CANCEL_POLL_S)
