"""Creates a job exactly once, however often the service fails, or the user interrupts it."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from deploy.base.console import say, tell
from deploy.job.job import Job
from deploy.job.ledger import LISTED_S, Attempt, OpenBackend, Reservation, Submission, watch_hint
from deploy.platform import buckets
from deploy.platform.errors import StateUnknownError
from deploy.platform.rest import Platform
from deploy.platform.vertex_api import TELL_S, ApiError, Clock, CustomJob, JobStatus, backoff, console_page, retried
from deploy.tiers.gcp_config import transfer_usd_per_gib
from deploy.tiers.tier import LABEL
from trainer.base.errors import PlatformFault, UserError

SHUTDOWN_WAIT_S = 900.0  # for the machines to shut down
CANCEL_POLL_S = 5.0


def cancel_and_wait(backend: Platform, name: str, clock: Clock) -> JobStatus:
    """Cancels the job and returns its status when it is over, or after SHUTDOWN_WAIT_S."""
    retried(partial(backend.cancel, name), clock)
    began = clock.now()
    while True:
        status = retried(partial(backend.get, name), clock)
        if status.over or clock.now() - began > SHUTDOWN_WAIT_S:
            return status
        clock.sleep(CANCEL_POLL_S)


def originals(jobs: Sequence[JobStatus]) -> dict[str, JobStatus]:
    """Returns, by the name of each job of one submission, oldest first, the job that it duplicates, or itself.

    A job that was created before an older one was over is its duplicate. One that was created later is none: somebody
    ran the printed command again.
    """
    by_name: dict[str, JobStatus] = {}
    original = None
    for job in sorted(jobs, key=lambda job: (job.created or 0.0, job.name)):
        if original is None or (original.over and (job.created or 0.0) > (original.ended or 0.0)):
            original = job
        by_name[job.name] = original
    return by_name


def cancel_duplicates(jobs: Sequence[JobStatus], backend: Platform, clock: Clock) -> dict[str, JobStatus]:
    """Cancels the duplicates among the jobs of one submission, and returns `originals`."""
    by_name = originals(jobs)
    for job in jobs:
        if by_name[job.name].name != job.name and not job.over:
            cancel_duplicate(job, by_name[job.name].name, backend, clock)
    return by_name


def cancel_duplicate(job: JobStatus, original: str, backend: Platform, clock: Clock) -> None:
    """Cancels a job that duplicates the one named `original`, and prints that."""
    retried(partial(backend.cancel, job.name), clock)
    tell(f"cancelled {job.name}: a duplicate of {original}")


FIRST_WAIT_S = 5.0  # before a refused request is repeated
CREATE_S = 300.0  # how long requests are repeated
LISTINGS, LOOK_S = 10, 3.0  # so many listings without the job come before another request; seconds between them


class Creation:
    """Creates the job of one request. `before_request` is called immediately before each request is sent."""

    def __init__(
        self, backend: Platform, request: CustomJob, clock: Clock, before_request: Callable[[], None] = lambda: None
    ) -> None:
        self.backend, self._request, self._clock, self._before_request = backend, request, clock, before_request
        self.unclear = False  # whether a request whose response is not known may have created the job
        self.name = ""  # of the job, as soon as it is known

    def run(self) -> str:
        """Creates the job and returns its name; after a lost response it looks for the job before it sends another.

        Raises StateUnknownError if a job may have been created and none is listed.
        """
        began = self._clock.now()
        for wait in backoff(FIRST_WAIT_S):
            self._before_request()
            try:
                self.name = self.backend.create(self._request)
            except ApiError as error:
                failure, self.unclear = error, self.unclear or error.may_have_succeeded
                self.backend.sent = False
            else:
                if self.unclear:
                    tell("warning: a response was lost: a second job is cancelled as soon as `watch` or `jobs` sees it")
                return self.name
            last = not failure.transient or self._clock.now() + wait - began > CREATE_S
            if last and not self.unclear:
                raise failure
            then = "looks for the job" if self.unclear else f"tries again after {wait:.0f} s"
            tell(f"the submission failed ({failure}): {then}")
            if not self.unclear:
                self._clock.sleep(wait)
            elif self.look(0.0 if last else LISTED_S, 1 if last else LISTINGS):
                return self.name
            if last:
                raise StateUnknownError(0, f"the submission failed ({failure}), and its job is not listed yet")
        raise AssertionError("backoff never ends")

    def look(self, seconds: float = LISTED_S, listings: int = LISTINGS) -> str:
        """Looks for the job of the request for `seconds`, and returns its name, as `look_for` does."""
        label, since = self._request.labels[LABEL], self._clock.now() + seconds - LISTED_S
        self.name = look_for(label, self.backend, self._clock, since, listings)
        return self.name


def look_for(label: str, backend: Platform, clock: Clock, since: float, listings: int = 1) -> str:
    """Returns the name of the job with this label, and cancels its duplicates; "" if none is listed.

    Looks until LISTED_S after `since`, the time of the last request, and at least `listings` times. Raises
    StateUnknownError if jobs cannot be listed.
    """
    until, tell_at = since + LISTED_S, clock.now() + TELL_S
    give_up = max(until, clock.now() + LISTED_S)  # if jobs cannot be listed
    while True:
        failure: ApiError | None = None
        try:
            if by_name := cancel_duplicates(backend.jobs(label), backend, clock):
                return [*by_name.values()][-1].name
            listings -= 1
        except ApiError as error:
            failure = error
        now = clock.now()
        if failure and (not failure.transient or now >= give_up):
            raise StateUnknownError(failure.code, f"cannot check whether a lost response created a job ({failure})")
        if not failure and now >= until and listings <= 0:
            return ""
        if now >= tell_at:
            tell_at = now + TELL_S
            tell(f"looks for the job by its label {label}: for {max(until - now, 0.0):.0f} s more")
        clock.sleep(LOOK_S)


def check_resources(jobs: Sequence[Job]) -> float:
    """Prints what data in another region cost, and returns the most USD that a job pays if each worker reads them once.

    Raises UserError if an input does not exist, or a bucket is on another continent than the machines.
    """
    inputs = {
        address: name for job in jobs for name, address in job.workload.inputs.items() if address.startswith("gs://")
    }
    workers_by_place = {
        ("/".join(address.split("/")[:3]), job.gcp.region): job.tier.workers
        for job in jobs for address in (job.output, *job.workload.inputs.values()) if address.startswith("gs://")
    }  # fmt: skip
    usd_by_region = defaultdict[str, float](float)
    for (bucket, region), workers in sorted(workers_by_place.items()):
        location = buckets.location(bucket)
        if price := transfer_usd_per_gib(bucket, region, location):
            gib = sum(buckets.size(address) for address in inputs if f"{address}/".startswith(f"{bucket}/")) / 2**30
            usd = price * gib * workers
            amount = "an amount" if math.isnan(price) else f"{price:.2f} USD"
            size = f": {gib:.2f} GiB of data, {usd:.2f} USD if each worker reads them once" if usd > 0 else ""
            say(f"{bucket} is in {location}, the job runs in {region}: slower, and {amount} a GiB "
                f"(https://cloud.google.com/storage/pricing#network-buckets){size}")  # fmt: skip
            usd_by_region[region] += usd if usd > 0 else 0.0
    for address, name in inputs.items():
        if not buckets.exists(address):
            raise UserError(f"{name}={address}: no objects found: check with `gcloud storage ls {address}`")
    return max(usd_by_region.values(), default=0.0)


def upload_packages(jobs: Sequence[Job]) -> None:
    """Builds and uploads the packages of jobs that are not built or uploaded yet; prints their addresses."""
    for uri, package in {package.uri(job.gcp.bucket): package for job in jobs for package in job.packages}.items():
        buckets.upload(package.build(), uri)
        say(f"package {uri}")


def submit_job(job: Job, record: Submission, open_backend: OpenBackend, clock: Clock) -> str:
    """Reserves the job directory, creates the job and returns its name; records each step before and after it.

    After Ctrl-C, raises KeyboardInterrupt if the job runs or was never requested, StateUnknownError if it may still
    appear.
    """
    project, region = job.gcp.project, job.gcp.region
    attempt = Attempt(job.tier.name, project, region, job.tier.price_per_hour, job.output, name=job.name)
    record.attempts.append(attempt)
    record.write()
    reservation = Reservation(record, open_backend, clock)
    request = job.request(record.label)
    creation = Creation(open_backend(project, region), request, clock, reservation.renew)
    advice = f"`python -m deploy watch {record.submission}` looks for it again, and so does the same command"
    try:
        reservation.take()
        reservation.complete(creation.run())
        say(f"submitted {attempt.job}\n{console_page(attempt.job, project)}")
    except KeyboardInterrupt:
        attempt.state = "INTERRUPTED"
        record.write()  # before anything else: a second Ctrl-C may come
        attempt.job = attempt.job or creation.name
        if not (attempt.job or creation.unclear or creation.backend.sent):
            attempt.state, attempt.error = "NOT SUBMITTED", "stopped before the job was requested"
            record.write()
            reservation.release()
            raise
        if not attempt.job:
            attempt.error = "stopped while the job was created, and it is not listed yet"
            try:
                tell(f"stopped while the job is created: looks for it for up to {LISTED_S:.0f} s; Ctrl-C skips that")
                attempt.job = creation.look()
            except (KeyboardInterrupt, StateUnknownError):
                tell("stopped looking for the job")
        if not attempt.job:
            record.write()
            raise StateUnknownError(0, f"{attempt.error}: {advice}") from None
        attempt.error = ""
        record.write()
        tell(f"{attempt.job} was created and goes on: {watch_hint(attempt.job)}; the same command follows it")
        raise KeyboardInterrupt(attempt.job) from None  # its argument says that a message was printed
    except StateUnknownError as error:
        attempt.error = str(error)
        record.write()
        raise StateUnknownError(error.code, f"{error}: {advice}") from None
    except (ApiError, UserError, PlatformFault) as error:
        attempt.state, attempt.error = "NOT SUBMITTED", str(error)
        record.write()
        reservation.release()
        raise
    return attempt.job
