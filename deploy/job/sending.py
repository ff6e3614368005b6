"""Creates a job exactly once, however often the service fails, or the user interrupts it, and
cancels duplicates.

The record in a job directory, OUTPUT/submission.json, names the submission that may write there.
Any machine may replace it, but only if its generation is still the one that was read, and only once
no job of that submission runs or can still appear.
"""

import json
import math
import os
import platform
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from deploy.base.console import say, tell
from deploy.job.cost import format_duration
from deploy.job.job import Job
from deploy.job.ledger import RECORD, Attempt, Submission, watch_hint
from deploy.packaging.image_choice import TO_BUILD
from deploy.packaging.packages import Package
from deploy.platform import buckets
from deploy.platform.api_error import ApiError
from deploy.platform.automatic_image import request_image
from deploy.platform.errors import JobUnknown
from deploy.platform.readiness import findings
from deploy.platform.rest import Platform
from deploy.platform.retries import TELL_S, backoff, retried
from deploy.platform.vertex_api import JobStatus, console_page
from deploy.tiers.gcp_config import GcpConfig, transfer_usd_per_gib
from deploy.tiers.tier import LABEL, Tier
from trainer.base.errors import PlatformFault, UserError
from trainer.base.storage.gcs import Conflict, NoPermission
from trainer.base.storage.local_files import is_running

OpenBackend = Callable[[str, str], Platform]  # (project, region)


def originals(jobs: Sequence[JobStatus]) -> dict[str, JobStatus]:
    """Returns the job that each job of a submission, oldest first, duplicates, or itself.

    A job that was created before an older one was over is its duplicate. One that was created later
    is none: somebody ran the printed command again.
    """
    by_name: dict[str, JobStatus] = {}
    original = None
    for job in sorted(jobs, key=lambda job: (job.created or 0.0, job.name)):
        if original is None or (original.over and (job.created or 0.0) > (original.ended or 0.0)):
            original = job
        by_name[job.name] = original
    return by_name


def cancel_duplicates(jobs: Sequence[JobStatus], backend: Platform) -> dict[str, JobStatus]:
    """Cancels the duplicates among the jobs of one submission, and returns `originals`."""
    by_name = originals(jobs)
    for job in jobs:
        if by_name[job.name].name != job.name and not job.over:
            cancel_duplicate(job, by_name[job.name].name, backend)
    return by_name


def cancel_duplicate(job: JobStatus, original: str, backend: Platform) -> None:
    """Cancels a job that duplicates the one named `original`, and prints that."""
    retried(partial(backend.cancel, job.name), backend.clock)
    tell(f"cancelled {job.name}: a duplicate of {original}")


FIRST_WAIT_S = 5.0  # before a refused request is repeated
CREATE_S = 300.0  # how long requests are repeated
# so many listings without the job come before another request; seconds between them
LISTINGS = 10
LOOK_S = 3.0
# The longest time until a new job is listed. An assumption: Vertex AI does not document how far its
# lists may lag.
LISTED_S = 60.0
# a submission on another machine whose record was not renewed for so long is taken to have ended
SILENT_S = 300.0


class Creation:
    """Creates the next job of a submission, in a job directory that it reserves."""

    def __init__(self, job: Job, record: Submission, open_backend: OpenBackend) -> None:
        project = job.gcp.project
        region = job.gcp.region
        tier = job.tier
        price = tier.bound_per_hour
        self._attempt = Attempt(tier.name, project, region, price, job.output, name=job.name)
        record.attempts.append(self._attempt)
        record.write()
        self._record = record
        self._request = job.request(len(record.attempts))
        self._open = open_backend
        self._uri = f"{self._attempt.output}/{RECORD}"
        self._about = {
            "submission": record.label,
            "project": project,
            "region": region,
            "host": platform.node(),
            "machine": _machine(),
            "process": os.getpid(),
        }
        # of the record in the job directory; None: not reserved
        self._generation: int | None = None
        self._backend = open_backend(project, region)
        self._clock = self._backend.clock
        # whether a request whose response is not known may have created the job
        self._unclear = False

    def create(self) -> None:
        """Reserves the job directory and creates the job; records each step before and after it.

        After Ctrl-C, raises KeyboardInterrupt if the job runs or was never requested, JobUnknown if
        it may still appear.
        """
        record = self._record
        attempt = self._attempt
        advice = (
            f"`python -m deploy watch {record.submission}` looks for it again, and so does the same"
            " command"
        )
        try:
            self._reserve()
            self._request_job()
            say(f"submitted {attempt.job}\n{console_page(attempt.job, attempt.project)}")
        except KeyboardInterrupt:
            # Whether the job runs: not requested, created, or perhaps created and to be looked for.
            attempt.state = "INTERRUPTED"
            record.write()  # before anything else: a second Ctrl-C may come
            if not (attempt.job or self._unclear or self._backend.sent):
                self._release("stopped before the job was requested")
                raise
            if not attempt.job:
                attempt.error = "stopped while the job was created, and it is not listed yet"
                try:
                    tell(
                        f"stopped while the job is created: looks for it for up to {LISTED_S:.0f}"
                        " s; Ctrl-C skips that"
                    )
                    self._look()
                except (KeyboardInterrupt, JobUnknown):
                    tell("stopped looking for the job")
            if not attempt.job:
                record.write()
                raise JobUnknown(f"{attempt.error}: {advice}") from None
            attempt.error = ""
            record.write()
            tell(
                f"{attempt.job} was created and is running: {watch_hint(attempt.job)}; the same"
                " command follows it"
            )
            # its argument says that a message was printed
            raise KeyboardInterrupt(attempt.job) from None
        except JobUnknown as error:
            attempt.error = str(error)
            record.write()
            raise JobUnknown(f"{error}: {advice}") from None
        except (ApiError, UserError, PlatformFault) as error:
            self._release(str(error))
            raise

    def _reserve(self) -> None:
        """Reserves the job directory. Raises UserError if another submission may write to it.

        An account that may not write there gets a warning and reserves nothing: the job's own may
        be allowed to.
        """
        try:
            text, generation = buckets.read_text(self._uri)
            if text:
                self._wait_until_free(text)
            self._write(generation, sending=False)
        except NoPermission as error:
            tell(f"warning: {error}: make sure that no other job writes to {self._attempt.output}")

    def _request_job(self) -> None:
        """Creates the job and records its name; after a lost response it first looks for the job.

        Raises JobUnknown if a job may have been created and none is listed, and UserError if
        another submission took the directory meanwhile, for example while this machine slept.
        """
        began = self._clock.now()
        for wait in backoff(FIRST_WAIT_S):
            # Both records say that the submission goes on and sends a request now.
            if self._generation is not None:
                self._write(self._generation, sending=True)
            self._attempt.sent_at = self._clock.now()
            self._record.write()
            try:
                self._attempt.job = self._backend.create(self._request)
            except ApiError as error:
                failure = error
                self._unclear = self._unclear or error.may_have_succeeded
                self._backend.sent = False
            else:
                if self._unclear:
                    tell(
                        "warning: a response was lost: a second job is cancelled as soon as `watch`"
                        " or `jobs` sees it"
                    )
                break
            # The request failed: look for its job if it may have created one, else wait and repeat
            # it, until the time is up.
            is_last = not failure.transient or self._clock.now() + wait - began > CREATE_S
            if is_last and not self._unclear:
                raise failure
            then = "looks for the job" if self._unclear else f"tries again after {wait:.0f} s"
            tell(f"the submission failed ({failure}): {then}")
            if not self._unclear:
                self._clock.sleep(wait)
            elif self._look(0.0 if is_last else LISTED_S, 1 if is_last else LISTINGS):
                break
            if is_last:
                raise JobUnknown(
                    f"the submission failed ({failure}), and its job is not listed yet"
                )
        self._complete()

    def _look(self, seconds: float = LISTED_S, listings: int = LISTINGS) -> str:
        """Looks for the requested job for `seconds`; returns its name as `look_for` does."""
        since = self._clock.now() + seconds - LISTED_S
        self._attempt.job = look_for(self._request.labels[LABEL], self._backend, since, listings)
        return self._attempt.job

    def _release(self, error: str) -> None:
        """Records why no job was created, and frees the directory if it can."""
        self._attempt.state = "NOT SUBMITTED"
        self._attempt.error = error
        self._record.write()
        with suppress(UserError, PlatformFault, ValueError, AttributeError):
            text, generation = buckets.read_text(self._uri)
            if json.loads(text or "{}").get("submission") == self._about["submission"]:
                buckets.delete(self._uri, generation)

    def _complete(self) -> None:
        """Records the job that was created.

        If the bucket fails, a lost index cannot be restored in full.
        """
        self._attempt.state = "SUBMITTED"
        self._record.write()
        if self._generation is not None:
            details = {
                "job": self._attempt.job,
                "tier": self._attempt.tier,
                "command": self._record.command,
                "sources": self._record.sources,
                "detached": self._record.detached,
            }
            with suppress(UserError, PlatformFault):
                self._write(self._generation, sending=True, **details)

    def _write(self, generation: int, *, sending: bool, **details: Any) -> None:
        """Writes the record in the bucket, with `details` of a job that was created.

        It then gives up soon: the job runs without the record. Raises UserError if another
        submission has written meanwhile.
        """
        content = {**self._about, "time": self._clock.now(), "sending": sending, **details}
        text = json.dumps(content, indent=2) + "\n"
        try:
            self._generation = buckets.write(self._uri, text, generation, quick=bool(details))
        except Conflict:
            raise UserError(
                f"{self._attempt.output}: another submission into it began meanwhile: use another"
                " --name or --job_dir"
            ) from None

    def _wait_until_free(self, text: str) -> None:
        """Returns once the submission of the record `text` can have no running job.

        Raises UserError while it may have one.
        """
        try:
            record: Mapping[str, Any] = json.loads(text)
            began = float(record["time"])
            submission = str(record["submission"])
            place = str(record["project"]), str(record["region"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{self._uri} is damaged: remove it if no job writes to that folder"
            ) from None
        # Until when its job may still appear in a listing. A process that ended on this machine
        # sends nothing more; one elsewhere is known by its silence alone.
        process = str(record.get("process"))
        ended_here = record.get("machine") == _machine() and not is_running(process)
        until = began + SILENT_S
        if ended_here:
            until = began + (LISTED_S if record.get("sending") else 0.0)
        while True:
            jobs = retried(partial(self._open(*place).jobs, submission), self._clock)
            now = self._clock.now()
            if running := next((job for job in jobs if not job.over), None):
                raise UserError(
                    f"{self._attempt.output}: a job writes to it already: {running.name}"
                    f" ({running.state}): {watch_hint(running.name)}; or use another --name or"
                    " --job_dir"
                )
            if jobs or now >= until:
                return
            if not ended_here:
                raise UserError(
                    f"{self._attempt.output}: a submission into it began on {record.get('host')},"
                    f" its last sign of life is {format_duration(max(now - began, 0.0))} old, and"
                    f" its job is not listed yet: wait {format_duration(until - now)}, or remove"
                    f" {self._uri} if it was stopped"
                )
            tell(f"looks for {until - now:.0f} s for a job of a submission that ended here")
            self._clock.sleep(until - now)


def _machine() -> str:
    """Returns an identifier of this machine since its last start, and of this container on it."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{platform.node()} {uuid.getnode():x}"


def look_for(label: str, backend: Platform, since: float, listings: int = 1) -> str:
    """Returns the name of the job with this label, "" if none is listed; cancels its duplicates.

    Looks until LISTED_S after `since`, the time of the last request, and at least `listings` times.
    Raises JobUnknown if jobs cannot be listed.
    """
    clock = backend.clock
    until = since + LISTED_S
    give_up = max(until, clock.now() + LISTED_S)  # if jobs cannot be listed
    tell_at = clock.now() + TELL_S
    while True:
        try:
            if by_name := cancel_duplicates(backend.jobs(label), backend):
                newest = list(by_name)[-1]
                return by_name[newest].name  # itself, or the job that it duplicates
            listings -= 1
            if listings <= 0 and clock.now() >= until:
                return ""
        except ApiError as error:
            if not error.transient or clock.now() >= give_up:
                raise JobUnknown(
                    f"cannot check whether a lost response created a job ({error})"
                ) from None
        now = clock.now()
        if now >= tell_at:
            tell_at = now + TELL_S
            tell(f"looks for the job by its label {label}: for {max(until - now, 0.0):.0f} s more")
        clock.sleep(LOOK_S)


def check_resources(jobs: Sequence[Job]) -> float:
    """Prints what the jobs would lack, and what data in another region cost.

    Returns the most USD that a job pays if each worker reads them once.

    Raises UserError if an input does not exist, or a bucket is on another continent than the
    machines.
    """
    # Quota and permissions, once for each project and region.
    tiers = defaultdict[GcpConfig, dict[str, Tier]](dict)
    for job in jobs:
        tiers[job.gcp][job.tier.name] = job.tier
    for gcp in tiers:
        for finding in findings(gcp, [*tiers[gcp].values()]):
            if finding.state == "bad":
                say(f"warning: {finding}")
    # The inputs in buckets, each with its flag; and the workers that use a bucket from a region.
    inputs = dict[str, str]()
    workers_by_place = dict[tuple[str, str], int]()
    for job in jobs:
        flags = {address: name for name, address in job.workload.inputs.items()}
        for address in (job.output, *flags):
            if address.startswith("gs://"):
                bucket = "/".join(address.split("/")[:3])
                workers_by_place[bucket, job.gcp.region] = job.tier.workers
                if address in flags:
                    inputs[address] = flags[address]
    # What reading from another region costs.
    usd_by_region = defaultdict[str, float](float)
    for (bucket, region), workers in sorted(workers_by_place.items()):
        location = buckets.location(bucket)
        if price := transfer_usd_per_gib(bucket, region, location):
            read = [address for address in inputs if f"{address}/".startswith(f"{bucket}/")]
            gib = sum(map(buckets.size, read)) / 2**30
            usd = price * gib * workers
            amount = "an amount" if math.isnan(price) else f"{price:.2f} USD"
            size = ""
            if usd > 0:
                size = f": {gib:.2f} GiB of data, {usd:.2f} USD if each worker reads them once"
            say(
                f"{bucket} is in {location}, the job runs in {region}: slower, and {amount} a GiB "
                f"(https://cloud.google.com/storage/pricing#network-buckets){size}"
            )
            usd_by_region[region] += usd if usd > 0 else 0.0
    for address, name in inputs.items():
        if not buckets.exists(address):
            raise UserError(
                f"{name}={address}: no objects found: check with `gcloud storage ls {address}`"
            )
    return max(usd_by_region.values(), default=0.0)


def upload_packages(jobs: Sequence[Job]) -> None:
    """Builds and uploads the packages that the jobs still lack, and prints their addresses.

    Has Cloud Build make the images of --image=auto that there are not yet.
    """
    packages = dict[str, Package]()
    for job in jobs:
        packages |= {package.uri(job.gcp.bucket): package for package in job.packages}
    for uri, package in packages.items():
        if buckets.upload(package.build(), uri):
            say(f"package {uri}")
    lacking = {(job.gcp, job.requirements): job for job in jobs if job.options.image == TO_BUILD}
    for gcp, requirements in lacking:
        say(request_image(gcp, requirements))
