"""Submits a job to Vertex AI exactly once, however often the service fails; checks what it needs, uploads packages."""

import dataclasses
import functools
import sys
from collections.abc import Sequence

from deploy.tiers.checks import check_continent, multi_regional
from deploy.tiers.images import IMAGE_RECORD
from deploy.tiers.job_spec import Job
from deploy.tiers.job_tracking import with_tensorboard
from deploy.tiers.packages import Package
from deploy.tiers.spec_changes import LABEL
from deploy.vertex.api import ApiError, CustomJob, JobStatus
from deploy.vertex.cancellation import cancel_doubles, oldest_first
from deploy.vertex.errors import StateUnknownError
from deploy.vertex.history import Attempt, Submission
from deploy.vertex.reservation import OpenBackend, release, reserve
from deploy.vertex.rest import Backend
from deploy.vertex.retry import RETRY_S, Clock, backoff, retried
from deploy.vertex.spending import price_label
from trainer.base.errors import UserError

FIRST_WAIT_S = 5.0  # before a refused request is repeated
SEARCH_S, SEARCH_LISTINGS = 60.0, 10  # a new job may take a while to appear in the list


def check_resources(job: Job, backend: Backend, clock: Clock) -> None:
    """Raises UserError if an input or the image does not exist, or a bucket is on another continent than the machines.

    Of images, only one that was built in this folder is looked for.
    """
    inputs = {name: address for name, address in job.request.inputs.items() if address.startswith("gs://")}
    for bucket in sorted({"/".join(address.split("/")[:3]) for address in (job.output, *inputs.values())}):
        location = retried(functools.partial(backend.location, bucket), clock)
        check_continent(bucket, job.gcp.region, location)
        if "tensorboard" in job.spec and job.output.startswith(f"{bucket}/"):
            for warning in multi_regional(bucket, location):
                print(f"# {warning}", flush=True)
    for name, address in inputs.items():
        if not retried(functools.partial(backend.exists, address), clock):
            raise UserError(f"{name}={address}: no objects found: check with `gcloud storage ls {address}`")
    if job.image.built and not retried(functools.partial(backend.has_image, job.image.uri), clock):
        raise UserError(f"{job.image.uri}, built in this folder, is gone: build it again, or remove {IMAGE_RECORD}")


def upload_packages(packages: Sequence[Package], bucket: str, backend: Backend, clock: Clock) -> None:
    """Builds and uploads the packages that are not built or uploaded yet; prints their addresses."""
    for package in packages:
        uri = package.uri(bucket)
        retried(functools.partial(backend.upload, package.build(), uri), clock)
        print(f"package {uri}", flush=True)


def submit_job(job: Job, record: Submission, open_backend: OpenBackend, clock: Clock) -> str:
    """Reserves the job directory, creates the job, returns its name; records the attempt before and after."""
    project, region = job.gcp.project, job.gcp.region
    job = dataclasses.replace(job, spec=with_tensorboard(job.spec, job.gcp))
    backend = open_backend(project, region)
    attempt = Attempt(job.tier.name, project, region, job.tier.price_per_hour, job.output)
    record.attempts.append(attempt)
    record.write()
    label, reserved = attempt_label(record.submission, len(record.attempts)), False
    hint = f"see `python -m deploy jobs --project={project} --region={region}` for whether the job was created"
    try:
        reserve(job.output, label, job.gcp, open_backend, clock)
        reserved = True
        name = submit_once(backend, custom_job(job, label), clock)
    except StateUnknownError as error:
        attempt.error = str(error)
        record.write()
        raise StateUnknownError(error.code, f"{error}: {hint}") from None
    except (ApiError, UserError) as error:
        attempt.state, attempt.error = "NOT SUBMITTED", str(error)
        record.write()
        if reserved:
            release(job.output, label, backend)
        raise
    except KeyboardInterrupt:
        print(f"stopped while submitting: {hint}", file=sys.stderr)
        raise
    attempt.job, attempt.state = name, "SUBMITTED"
    record.write()
    number = name.rsplit("/", 1)[-1]
    page = f"https://console.cloud.google.com/vertex-ai/locations/{region}/training/{number}"
    try:
        print(f"submitted {name}\n{page}?project={project}", flush=True)
    except BrokenPipeError:  # as of `head`
        print(f"submitted {name}: watch it: python -m deploy watch {name}", file=sys.stderr)
        raise
    return name


def attempt_label(submission: str, attempt: int = 1) -> str:
    """Returns the label of a submission's attempt, counted from 1."""
    return f"{submission}-{attempt}"


def custom_job(job: Job, label: str) -> CustomJob:
    """Builds the request; `label` is unique to this attempt, so it finds a job whose response was lost."""
    labels = {**job.labels, LABEL: label, **price_label(job.tier.price_per_hour)}
    return CustomJob(job.name, job.spec, labels, job.kms_key)


def submit_once(backend: Backend, request: CustomJob, clock: Clock) -> str:
    """Creates one job for this request and returns its name; after a lost response it searches before it tries again.

    Raises StateUnknownError if a job may have been created and none is listed.
    """
    began, unclear = clock.now(), False
    for wait in backoff(FIRST_WAIT_S):
        try:
            name = backend.submit(request)
        except ApiError as error:
            failure = error
        else:
            return _search(request, backend, clock, name) if unclear else name
        unclear = unclear or failure.may_have_succeeded
        last = not failure.transient or clock.now() + wait - began > RETRY_S
        if last and not unclear:
            raise failure
        next_step = "checking whether the job exists" if unclear else "trying again"
        print(f"the submission failed ({failure}): {next_step}", file=sys.stderr, flush=True)
        if not unclear:
            clock.sleep(wait)
        existing = _search(request, backend, clock) if unclear else ""
        if existing:
            return existing
        if last:
            raise StateUnknownError(0, f"the submission failed ({failure}), and its job is not listed yet")
    raise AssertionError("backoff never ends")


def _search(request: CustomJob, backend: Backend, clock: Clock, name: str = "") -> str:
    """Returns the job of this request that counts and cancels its doubles; `name`, a job known to exist, if none is.

    Looks until there is a job beside `name`, and else for SEARCH_S and SEARCH_LISTINGS at least: the list may lag.
    Raises StateUnknownError if listing fails and no job is known to exist.
    """
    until, hint = clock.now() + SEARCH_S, "`python -m deploy jobs` cancels a double if there is one"
    listings, found = 0, list[JobStatus]()
    try:
        while not any(job.name != name for job in found) and (listings < SEARCH_LISTINGS or clock.now() < until):
            clock.sleep(SEARCH_S / SEARCH_LISTINGS)
            found, listings = oldest_first(request.labels[LABEL], backend, clock), listings + 1
        counts = cancel_doubles(found, backend, clock)
    except ApiError as error:
        reason = f"cannot check whether a lost response created a job ({error})"
        if not name:
            raise StateUnknownError(error.code, reason) from None
        print(f"warning: {reason}: {hint}", file=sys.stderr, flush=True)
        return name
    if name and len(found) < 2:
        print(f"warning: a response was lost: run it in some minutes: {hint}", file=sys.stderr, flush=True)
    return counts[name].name if name in counts else next((job.name for job in reversed(counts.values())), name)
