"""A job on Vertex AI: its buckets looked at, its packages sent, and made once, however often the service fails."""

import functools
import sys
from collections.abc import Sequence

from deploy.spec.checks import check_continent
from deploy.spec.job_spec import Job
from deploy.spec.packages import Package, build
from deploy.vertex.api import LABEL, PRICE_LABEL, ApiError, Backend, CustomJob
from deploy.vertex.errors import Lost
from deploy.vertex.history import Attempt, Submission
from deploy.vertex.retry import RETRY_S, Clock, backoff, retried
from trainer.errors import UserError

LOOK_AFTER_S = 5.0  # a job just made may take a moment to be listed


def check_buckets(job: Job, backend: Backend, clock: Clock) -> None:
    """UserError where what is read is not there, or lies on another continent than the machines, or the output does."""
    inputs = {name: address for name, address in job.config.inputs.items() if address.startswith("gs://")}
    for bucket in sorted({"/".join(address.split("/")[:3]) for address in (job.output, *inputs.values())}):
        check_continent(bucket, job.gcp.region, retried(functools.partial(backend.location, bucket), clock))
    for name, address in inputs.items():
        if not retried(functools.partial(backend.holds, address), clock):
            raise UserError(f"{name}={address}: nothing lies there: check with `gcloud storage ls {address}`")


def ship(packages: Sequence[Package], bucket: str, backend: Backend, clock: Clock) -> None:
    """Builds what is not built and sends what is not there; prints the addresses."""
    for package in packages:
        wheel, uri = build(package), package.uri(bucket)
        retried(lambda: backend.upload(wheel, uri), clock)  # noqa: B023 (called at once)
        print(f"package {uri}", flush=True)


def create(job: Job, record: Submission, backend: Backend, clock: Clock) -> str:
    """Makes the job and returns its name; what was tried is kept before, what came of it after."""
    project, region = job.gcp.project, job.gcp.region
    attempt = Attempt(job.tier.name, project, region, job.tier.price_per_hour, job.output)
    record.attempts.append(attempt)
    record.write()
    look = f"see `python -m deploy jobs --project={project} --region={region}` for whether the job was made"
    try:
        name = submit_once(backend, custom_job(job, attempt_label(record.submission, len(record.attempts))), clock)
    except Lost as error:
        attempt.error = str(error)
        record.write()
        raise Lost(error.code, f"{error}: {look}") from None
    except (ApiError, UserError) as error:
        attempt.state, attempt.error = "NOT SUBMITTED", str(error)
        record.write()
        raise
    except KeyboardInterrupt:
        print(f"stopped while submitting: {look}", file=sys.stderr)
        raise
    attempt.job, attempt.state = name, "SUBMITTED"
    record.write()
    number = name.rsplit("/", 1)[-1]
    page = f"https://console.cloud.google.com/vertex-ai/locations/{region}/training/{number}"
    print(f"submitted {name}\n{page}?project={project}", flush=True)
    return name


def attempt_label(submission: str, attempt: int = 1) -> str:
    """The label of a submission's attempt, counted from 1."""
    return f"{submission}-{attempt}"


def custom_job(job: Job, label: str) -> CustomJob:
    """What is sent; `label` is of this attempt alone: it finds the job that a lost answer may have made."""
    price = job.tier.price_per_hour
    priced = {} if price is None else {PRICE_LABEL: f"{price:.4f}".replace(".", "-")}
    return CustomJob(job.name, job.spec, {LABEL: label, **priced})


def submit_once(backend: Backend, request: CustomJob, clock: Clock) -> str:
    """The name of the one job of this request, however often the service fails: looked for before it is made again.

    Lost where a job may have been made and none is found.
    """
    began, unclear = clock.now(), False
    for wait in backoff(LOOK_AFTER_S):
        try:
            name = backend.submit(request)
        except ApiError as error:
            failed = error
        else:
            return _looked_for(request, backend, clock, name) if unclear else name
        unclear = unclear or failed.may_have_worked
        last = not failed.transient or clock.now() + wait - began > RETRY_S
        if last and not unclear:
            raise failed
        print(f"the submission failed ({failed}): looking whether the job was made", file=sys.stderr, flush=True)
        clock.sleep(wait)
        made = unclear and _looked_for(request, backend, clock)
        if made:
            return made
        if last:
            raise Lost(0, f"the submission failed ({failed}), and no job of it is listed yet")
    raise AssertionError("backoff never ends")


def _looked_for(request: CustomJob, backend: Backend, clock: Clock, name: str = "") -> str:
    """`_only_one`, else `name`, a job that was made for certain; Lost where the service does not tell of any."""
    try:
        return _only_one(request, backend, clock) or name
    except ApiError as error:
        reason = f"whether an answer that was lost made a job cannot be learnt ({error})"
        if not name:
            raise Lost(error.code, reason) from None
        print(f"warning: {reason}: see `python -m deploy jobs`, and cancel a double", file=sys.stderr, flush=True)
        return name


def _only_one(request: CustomJob, backend: Backend, clock: Clock) -> str:
    """The oldest job of this request, or nothing; others, made by a service that was slow to list it, are cancelled."""
    made = retried(lambda: backend.jobs(request.labels[LABEL]), clock)
    names = [status.name for status in sorted(made, key=lambda status: status.created or 0.0)]
    for name in names[1:]:
        retried(functools.partial(backend.cancel, name), clock)
    return names[0] if names else ""
