"""Runs the jobs of a comparison in persistent resources: one for each kind of equal machines, which start only once.

Such machines cost money until somebody deletes them, and the API knows no deadline. So a guard, a small job, is there
before they are, and deletes them when no job uses them; this module deletes them after their last run, at a failure
and on Ctrl-C. docs/decisions/11-persistent-resource.md has the reasons.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.comparison.machine_kinds import GUARD_SLACK_S, Kind
from deploy.spec.gcp_config import GcpConfig
from deploy.spec.guard_job import IDLE_S, POLL_S, guard_package, guard_spec
from deploy.spec.job_spec import Job
from deploy.spec.packages import built
from deploy.spec.spec_changes import GUARD_LABEL, LABEL, RESOURCE_LABEL
from deploy.spec.tier import DISK
from deploy.vertex.api import ApiError, Backend, CustomJob, JobStatus, unless_missing
from deploy.vertex.costs import describe_run, format_duration, price_label
from deploy.vertex.errors import describe_error, describe_failure
from deploy.vertex.reservation import OpenBackend
from deploy.vertex.resources import delete_and_wait, end_guards, find_resource
from deploy.vertex.retry import Clock, retried
from deploy.vertex.submission import submit_once, upload_packages
from trainer.errors import PlatformFault, UserError
from trainer.reporting.run_files import read_json
from trainer.storage import write_whole

RECORD = "persistent_resources.json"  # in the comparison's folder, by kind: what was or may have been created
GUARD_RECORD = "guard.json"
READY_S = 1800.0  # the longest wait for the guard
UNSEEN_S = 300.0  # what was just created may be answered with 404 for this long
LEAST_LEFT_S = 600.0  # of the time of a resource that is used again
WAIT_S = 10.0


class Stopped(Exception):
    """Reports that the comparison was stopped."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """Describes a persistent resource that was or may have been created, after its guard.

    `deadline`: in seconds since 1970; `requested`: whether the request may have been sent.
    """

    project: str
    region: str
    id: str
    deadline: float
    requested: bool = False

    @property
    def name(self) -> str:
        """Returns the full name."""
        return f"projects/{self.project}/locations/{self.region}/persistentResources/{self.id}"

    @property
    def guard_label(self) -> str:
        """Returns the label of its guard's submission."""
        return f"{self.id}-guard"

    def guards(self, backend: Backend, clock: Clock) -> Sequence[JobStatus]:
        """Returns its guards: one, unless a lost response created a second."""
        return retried(functools.partial(backend.jobs, self.guard_label), clock)


class Records:
    """Keeps in the comparison's folder what was or may have been created, so that the same command finds it."""

    def __init__(self, out: Path) -> None:
        self._file, self._lock = out / RECORD, threading.Lock()

    def read(self) -> dict[str, Sent]:
        """Returns the records by kind. Raises UserError if the file is damaged."""
        if not self._file.exists():
            return {}
        try:
            return {key: Sent(**about) for key, about in read_json(self._file)[0].items()}
        except TypeError:
            raise UserError(
                f"{self._file} is damaged: see `python -m deploy jobs` for persistent resources, then remove the file"
            ) from None

    def put(self, key: str, sent: Sent | None) -> None:
        """Replaces the record of a kind; None removes it."""
        with self._lock:
            content = {name: dataclasses.asdict(each) for name, each in {**self.read(), key: sent}.items() if each}
            if content:
                write_whole(self._file, json.dumps(content, indent=2) + "\n")
            else:
                self._file.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Desk:
    """Holds what the machines of all kinds need of the comparison. `clock`: its sleep raises Stopped after a stop.

    `time_s`: how long a persistent resource may exist; `guard_usd`: an hour of its guard.
    """

    gcp: GcpConfig
    time_s: float
    submission: str
    guard_usd: float
    records: Records
    open: OpenBackend
    clock: Clock

    def delete(self, key: str, sent: Sent, clock: Clock) -> None:
        """Deletes a persistent resource, then ends its guard, and says what they cost, or what is left and why."""
        try:
            backend = self.open(sent.project, sent.region)
            last = delete_and_wait(backend, sent.id, clock)
            guard_usd = 0.0
            if last or not sent.requested:  # else a creation without a response may still take effect: the guard stays
                guard_usd = end_guards(backend, sent.id, sent.guards(backend, clock), clock)
        except (ApiError, KeyboardInterrupt) as error:
            why = describe_error(error, self.gcp) if isinstance(error, ApiError) else "stopped again"
            print(_left(sent, why), file=sys.stderr, flush=True)
            if isinstance(error, KeyboardInterrupt):
                raise
            return
        self.records.put(key, None)
        if last:
            ran, usd = describe_run(last, clock.now())
            cost = usd and f", {usd}; its guard: {guard_usd:.2f} USD"
            print(f"deleted persistent resource {sent.id}: its machines ran for {ran}{cost}", flush=True)


def _left(sent: Sent, why: str) -> str:
    return (
        f"persistent resource {sent.id} was not deleted ({why}): its guard does so after {format_duration(IDLE_S)} "
        f"without a job; sooner: python -m deploy cancel {sent.name}"
    )


class SharedMachines:
    """Represents the persistent resource of one kind: created for its first run, deleted after its last one.

    `left`: the runs to come; `sent`: the resource that an earlier command has created, to be used again.
    """

    def __init__(self, kind: Kind, left: int, sent: Sent | None, desk: Desk) -> None:
        self.kind, self._left, self._sent, self._desk = kind, left, sent, desk
        self._failure: Exception | None = None
        self._one_at_a_time = threading.Lock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the machines, which run one job at a time, and deletes them after the last run."""
        with self._one_at_a_time:
            stopped = False
            try:
                yield
            except Stopped:
                stopped = True
                raise
            finally:
                self._left -= not stopped
                if not self._left:
                    self.delete(self._desk.clock)

    def place(self, job: Job) -> Job:
        """Returns the job as it runs in the persistent resource, which is created if there is none, once it is ready.

        Raises ApiError, UserError or PlatformFault if it cannot be had; so do all later calls, at once.
        """
        if self._failure:
            raise self._failure
        try:
            sent = self._sent or self._create(job)
            self._wait_until_running(sent)
        except (ApiError, UserError, PlatformFault) as error:
            self._failure = error
            self.delete(self._desk.clock)
            raise
        pools = [pool and {**pool, "diskSpec": {**DISK, **pool.get("diskSpec", {})}}
                 for pool in job.spec["workerPoolSpecs"]]  # fmt: skip
        spec = {**job.spec, "workerPoolSpecs": pools, "persistentResourceId": sent.id}
        free = dataclasses.replace(job.tier, price_per_hour=None)  # the resource alone is paid for
        return dataclasses.replace(job, spec=spec, tier=free, labels={**job.labels, RESOURCE_LABEL: sent.id})

    def delete(self, clock: Clock) -> None:
        """Deletes the resource, if there is one."""
        if self._sent:
            self._desk.delete(self.kind.key, self._sent, clock)
            self._sent = None

    def _create(self, job: Job) -> Sent:
        """Starts the guard, and only then the machines, each recorded before it is requested."""
        desk, gcp = self._desk, self._desk.gcp
        id = f"compare-{desk.submission}-{self.kind.key}"
        self._sent = Sent(gcp.project, gcp.region, id, desk.clock.now() + desk.time_s)
        desk.records.put(self.kind.key, self._sent)
        backend = desk.open(gcp.project, gcp.region)
        self._start_guard(self._sent, job, backend)
        self._sent = dataclasses.replace(self._sent, requested=True)
        desk.records.put(self.kind.key, self._sent)
        request = self.kind.request(id, {**job.labels, LABEL: id}, job.kms_key)
        try:
            retried(functools.partial(backend.create_resource, request), desk.clock)
        except ApiError as error:
            if error.code != 409:  # a lost response: nobody else has this id
                raise
        print(f"requested persistent resource {id} for {self.kind.about}", flush=True)
        return self._sent

    def _start_guard(self, sent: Sent, job: Job, backend: Backend) -> None:
        """Submits the guard and waits until it has checked that it may do its work."""
        desk, clock, package = self._desk, self._desk.clock, built(guard_package())
        upload_packages([package], desk.gcp.bucket, backend, clock)
        output = f"{desk.gcp.bucket}/jobs/{sent.id}-guard"
        plan = {"resource": sent.name, "jobs": f"labels.{RESOURCE_LABEL}={sent.id}", "deadline": sent.deadline,
                "idle_s": IDLE_S, "poll_s": POLL_S, "output": output, "record": GUARD_RECORD}  # fmt: skip
        spec = guard_spec(plan, job.spec, package, desk.gcp.bucket, desk.time_s + GUARD_SLACK_S)
        labels = {**job.labels, LABEL: sent.guard_label, GUARD_LABEL: sent.id, **price_label(desk.guard_usd)}
        name = submit_once(backend, CustomJob(f"guard-of-{sent.id}", spec, labels, job.kms_key), clock)
        print(f"submitted the guard of {sent.id}: {name}", flush=True)
        until, uri = clock.now() + READY_S, f"{output}/{GUARD_RECORD}"
        status = None
        while not (found := retried(functools.partial(backend.read, uri), clock)):
            if status and status.over:  # it was before the record was looked for
                raise UserError(f"the guard {name} ended ({status.state}): {describe_failure(status)}")
            if clock.now() > until:
                retried(functools.partial(backend.cancel, name), clock)
                raise PlatformFault(f"the guard {name} has waited for a machine for {format_duration(READY_S)}")
            clock.sleep(WAIT_S)
            status = unless_missing(lambda: retried(functools.partial(backend.state, name), clock))
        if problem := json.loads(found[0]).get("error"):
            raise UserError(f"the guard of persistent resources: {problem}")

    def _wait_until_running(self, sent: Sent) -> None:
        """Waits for the machines. Raises PlatformFault if they, or their guard, are gone."""
        desk, backend = self._desk, self._desk.open(sent.project, sent.region)
        unseen_until = desk.clock.now() + UNSEEN_S
        while True:
            status = find_resource(backend, sent.id, desk.clock)
            problem = _problem(status, sent, desk.clock.now())
            if problem and (status or desk.clock.now() >= unseen_until):
                raise PlatformFault(f"persistent resource {sent.id} {problem}")
            guards = sent.guards(backend, desk.clock)
            if guards and all(guard.over for guard in guards):
                raise PlatformFault(f"persistent resource {sent.id} has no guard any more: it is deleted")
            if status and status.state == "RUNNING":
                return
            desk.clock.sleep(WAIT_S)


def _problem(status: JobStatus | None, sent: Sent, now: float) -> str:
    """Returns why no job can run in a persistent resource; empty if one can, or will."""
    if now >= sent.deadline:
        return "has reached its time (--persistent_resource)"
    if status and (status.error or status.state == "ERROR"):
        why = status.error.rstrip(".") or "no reason given"
        return f"failed: {why}: there may be no such machines, or no quota, in {sent.region}"
    if status is None or status.state == "STOPPING":
        return "is gone: its guard, or somebody else, deleted it"
    return ""


@contextlib.contextmanager
def shared_machines(runs: Sequence[tuple[Kind, int]], desk: Desk, final: Clock) -> Iterator[dict[str, SharedMachines]]:
    """Provides the machines of each kind, by tier, for so many runs; deletes all at the end of the block.

    First deletes what an earlier command left and these runs cannot use. `final`: a clock that never stops.
    """
    usable: dict[str, Sent] = {}
    for key, sent in desk.records.read().items():
        if any(kind.key == key for kind, _ in runs) and _is_usable(sent, desk, final):
            usable[key] = sent
            print(f"uses persistent resource {sent.id} again", flush=True)
        else:
            desk.delete(key, sent, final)
    found = [SharedMachines(kind, count, usable.get(kind.key), desk) for kind, count in runs]
    with contextlib.ExitStack() as ends:
        for machines in found:
            ends.callback(machines.delete, final)
        yield {name: machines for machines in found for name in machines.kind.names}


def _is_usable(sent: Sent, desk: Desk, clock: Clock) -> bool:
    """Returns whether jobs can run in what an earlier command created."""
    if desk.gcp.project != sent.project or desk.gcp.region != sent.region:
        return False
    backend = desk.open(sent.project, sent.region)
    status = find_resource(backend, sent.id, clock)
    if status is None or _problem(status, sent, clock.now() + LEAST_LEFT_S):
        return False
    return any(not guard.over for guard in sent.guards(backend, clock))
