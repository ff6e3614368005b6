"""Submits a job to Vertex AI: checks what it needs, uploads packages, records each step, and survives Ctrl-C."""

import dataclasses
from collections.abc import Sequence

from deploy.tiers.availability import check_continent
from deploy.tiers.job_spec import RenderedJob
from deploy.tiers.job_tracking import with_tensorboard
from deploy.tiers.output import say, tell
from deploy.tiers.packages import Package
from deploy.tiers.spec_changes import LABEL, PRICE_LABEL
from deploy.vertex import buckets
from deploy.vertex.api import ApiError, CustomJob
from deploy.vertex.creation import Creation
from deploy.vertex.errors import StateUnknownError
from deploy.vertex.history import Attempt, Submission
from deploy.vertex.logs import watch_hint
from deploy.vertex.reservation import LISTED_S, OpenBackend, Reservation
from deploy.vertex.retry import Clock
from trainer.base.errors import PlatformFault, UserError


def check_resources(job: RenderedJob) -> None:
    """Raises UserError if an input does not exist, or a bucket is on another continent than the machines."""
    inputs = {name: address for name, address in job.request.inputs.items() if address.startswith("gs://")}
    for bucket in sorted({"/".join(address.split("/")[:3]) for address in (job.output, *inputs.values())}):
        check_continent(bucket, job.gcp.region, buckets.location(bucket))
    for name, address in inputs.items():
        if not buckets.exists(address):
            raise UserError(f"{name}={address}: no objects found: check with `gcloud storage ls {address}`")


def upload_packages(packages: Sequence[Package], bucket: str) -> None:
    """Builds and uploads the packages that are not built or uploaded yet; prints their addresses."""
    for package in packages:
        buckets.upload(package.build(), package.uri(bucket))
        say(f"package {package.uri(bucket)}")


def submit_job(job: RenderedJob, record: Submission, open_backend: OpenBackend, clock: Clock) -> str:
    """Reserves the job directory, creates the job, returns its name; records the attempt before and after.

    After Ctrl-C it raises KeyboardInterrupt if the job runs or was never requested, StateUnknownError if it may appear
    later.
    """
    project, region = job.gcp.project, job.gcp.region
    job = dataclasses.replace(job, spec=with_tensorboard(job.spec, job.gcp))
    backend = open_backend(project, region)
    attempt = Attempt(job.tier.name, project, region, job.tier.price_per_hour, job.output)
    record.attempts.append(attempt)
    record.write()
    reservation = Reservation(job.output, record.label, job.gcp, open_backend, clock)

    def before_request() -> None:
        reservation.renew()
        attempt.sent_at = clock.now()
        record.write()

    creation = Creation(backend, custom_job(job, record.label), clock, before_request)
    try:
        reservation.take()
        attempt.job, attempt.state = creation.run(), "SUBMITTED"
        record.write()
        page = (
            f"https://console.cloud.google.com/vertex-ai/locations/{region}/training/{attempt.job.rsplit('/', 1)[-1]}"
        )
        say(f"submitted {attempt.job}\n{page}?project={project}")
    except KeyboardInterrupt:
        _interrupted(creation, record)
        if attempt.job:
            raise KeyboardInterrupt(attempt.job) from None  # has been told
        reservation.release()
        raise
    except StateUnknownError as error:
        attempt.error = str(error)
        record.write()
        raise StateUnknownError(error.code, f"{error}: {_finds(record)}") from None
    except (ApiError, UserError, PlatformFault) as error:
        attempt.state, attempt.error = "NOT SUBMITTED", str(error)
        record.write()
        reservation.release()
        raise
    return attempt.job


def _interrupted(creation: Creation, record: Submission) -> None:
    """Records what became of a submission that Ctrl-C ended. Raises StateUnknownError if its job may appear later."""
    attempt = record.attempts[-1]
    attempt.state = "INTERRUPTED"
    record.write()
    if not (attempt.job or creation.name or creation.may_exist):
        attempt.state, attempt.error = "NOT SUBMITTED", "stopped before the job was requested"
        record.write()
        return
    attempt.error = "stopped while the job was created, and it is not listed yet"
    try:
        if not (attempt.job or creation.name):
            tell(f"stopped while the job is created: looks for it for up to {LISTED_S:.0f} s; Ctrl-C skips that")
        attempt.job = attempt.job or creation.name or creation.look()
    except (KeyboardInterrupt, StateUnknownError):
        tell("not looked for any longer")
    if not attempt.job:
        record.write()
        raise StateUnknownError(0, f"{attempt.error}: {_finds(record)}")
    attempt.error = ""
    record.write()
    tell(f"{attempt.job} was created and goes on: {watch_hint(attempt.job)}; the same command follows it")


def _finds(record: Submission) -> str:
    return f"`python -m deploy watch {record.submission}` looks for it again, and so does the same command"


def custom_job(job: RenderedJob, label: str) -> CustomJob:
    """Builds the request; `label` is unique to this attempt, so it finds a job whose response was lost."""
    usd = job.tier.price_per_hour
    price = {} if usd is None else {PRICE_LABEL: f"{usd:.4f}".replace(".", "-")}
    labels = {**job.options.labels, LABEL: label, **price}
    return CustomJob(job.name, job.spec, labels, job.options.kms_key)
