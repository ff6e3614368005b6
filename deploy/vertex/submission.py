"""Submits a job to Vertex AI exactly once, however often the service fails; checks buckets, uploads packages."""

import functools
import sys
from collections.abc import Sequence

from deploy.spec.checks import check_continent
from deploy.spec.job_spec import Job
from deploy.spec.packages import Package, build_wheel
from deploy.vertex.api import LABEL, PRICE_LABEL, ApiError, Backend, CustomJob, JobStatus
from deploy.vertex.errors import StateUnknownError
from deploy.vertex.history import Attempt, Submission
from deploy.vertex.retry import RETRY_S, Clock, backoff, retried
from trainer.errors import UserError

LIST_DELAY_S = 5.0  # a new job may take a moment to appear in the list


def check_buckets(job: Job, backend: Backend, clock: Clock) -> None:
    """Raises UserError if an input does not exist, or a bucket is on another continent than the machines."""
    inputs = {name: address for name, address in job.config.inputs.items() if address.startswith("gs://")}
    for bucket in sorted({"/".join(address.split("/")[:3]) for address in (job.output, *inputs.values())}):
        check_continent(bucket, job.gcp.region, retried(functools.partial(backend.location, bucket), clock))
    for name, address in inputs.items():
        if not retried(functools.partial(backend.exists, address), clock):
            raise UserError(f"{name}={address}: no objects found: check with `gcloud storage ls {address}`")


def upload_packages(packages: Sequence[Package], bucket: str, backend: Backend, clock: Clock) -> None:
    """Builds and uploads the packages that are not built or uploaded yet; prints their addresses."""
    for package in packages:
        uri = package.uri(bucket)
        retried(functools.partial(backend.upload, build_wheel(package), uri), clock)
        print(f"package {uri}", flush=True)


def submit_job(job: Job, record: Submission, backend: Backend, clock: Clock) -> str:
    """Creates the job and returns its name; records the attempt before and the result after."""
    project, region = job.gcp.project, job.gcp.region
    attempt = Attempt(job.tier.name, project, region, job.tier.price_per_hour, job.output)
    record.attempts.append(attempt)
    record.write()
    hint = f"see `python -m deploy jobs --project={project} --region={region}` for whether the job was created"
    try:
        name = submit_once(backend, custom_job(job, attempt_label(record.submission, len(record.attempts))), clock)
    except StateUnknownError as error:
        attempt.error = str(error)
        record.write()
        raise StateUnknownError(error.code, f"{error}: {hint}") from None
    except (ApiError, UserError) as error:
        attempt.state, attempt.error = "NOT SUBMITTED", str(error)
        record.write()
        raise
    except KeyboardInterrupt:
        print(f"stopped while submitting: {hint}", file=sys.stderr)
        raise
    attempt.job, attempt.state = name, "SUBMITTED"
    record.write()
    number = name.rsplit("/", 1)[-1]
    page = f"https://console.cloud.google.com/vertex-ai/locations/{region}/training/{number}"
    print(f"submitted {name}\n{page}?project={project}", flush=True)
    return name


def attempt_label(submission: str, attempt: int = 1) -> str:
    """Returns the label of a submission's attempt, counted from 1."""
    return f"{submission}-{attempt}"


def custom_job(job: Job, label: str) -> CustomJob:
    """Builds the request; `label` is unique to this attempt, so it finds a job whose response was lost."""
    price = job.tier.price_per_hour
    price_label = {} if price is None else {PRICE_LABEL: f"{price:.4f}".replace(".", "-")}
    return CustomJob(job.name, job.spec, {LABEL: label, **price_label})


def submit_once(backend: Backend, request: CustomJob, clock: Clock) -> str:
    """Creates one job for this request and returns its name; after a failure it lists jobs before it tries again.

    Raises StateUnknownError if a job may have been created and none is listed.
    """
    began, unclear = clock.now(), False
    for wait in backoff(LIST_DELAY_S):
        try:
            name = backend.submit(request)
        except ApiError as error:
            failure = error
        else:
            return _find_created(request, backend, clock, name) if unclear else name
        unclear = unclear or failure.may_have_succeeded
        last = not failure.transient or clock.now() + wait - began > RETRY_S
        if last and not unclear:
            raise failure
        print(f"the submission failed ({failure}): checking whether the job exists", file=sys.stderr, flush=True)
        clock.sleep(wait)
        existing = unclear and _find_created(request, backend, clock)
        if existing:
            return existing
        if last:
            raise StateUnknownError(0, f"the submission failed ({failure}), and its job is not listed yet")
    raise AssertionError("backoff never ends")


def _find_created(request: CustomJob, backend: Backend, clock: Clock, name: str = "") -> str:
    """Returns `_keep_oldest`, else `name`, a job known to exist; StateUnknownError without one if listing fails."""
    try:
        return _keep_oldest(request, backend, clock) or name
    except ApiError as error:
        reason = f"cannot check whether a lost response created a job ({error})"
        if not name:
            raise StateUnknownError(error.code, reason) from None
        hint = "see `python -m deploy jobs`, and cancel a duplicate"
        print(f"warning: {reason}: {hint}", file=sys.stderr, flush=True)
        return name


def _keep_oldest(request: CustomJob, backend: Backend, clock: Clock) -> str:
    """Returns the oldest job of this request, or nothing, and cancels duplicates, created while the list was late."""
    names = [status.name for status in oldest_first(request.labels[LABEL], backend, clock)]
    for name in names[1:]:
        retried(functools.partial(backend.cancel, name), clock)
    return names[0] if names else ""


def oldest_first(label: str, backend: Backend, clock: Clock) -> list[JobStatus]:
    """Returns the jobs with this label, oldest first: the first one counts, the others are duplicates."""
    return sorted(retried(lambda: backend.jobs(label), clock), key=lambda status: status.created or 0.0)
