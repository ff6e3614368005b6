"""Finds jobs of Vertex AI again, and lists them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from deploy.api.request import Value, verb_usage
from deploy.base.console import printed_on
from deploy.job.ledger import find_attempt, find_elsewhere, submissions
from deploy.job.options import check_labels
from deploy.job.sending import cancel_duplicates, look_for
from deploy.job.vertex_job import VertexJob
from deploy.job.watching import with_stop_reason
from deploy.platform.errors import api_errors
from deploy.platform.rest import Platform
from deploy.platform.retries import retried
from deploy.platform.vertex_api import STATES, JobStatus
from deploy.tiers.gcp_config import (
    needed_project,
    needed_region,
    read_project,
    read_region,
    regions_in,
)
from deploy.tiers.tier import LABEL
from trainer.base.errors import UserError
from trainer.base.settings.fields import options_class, read_values, setting


def attach(
    job: str = "",
    project: str = "",
    region: str = "",
) -> VertexJob:
    """Returns the newest job with this name, number, display name or submission.

    It counts whoever submitted it. Without `job`, returns the last one submitted from this folder.
    `region`: where to look, NAME,NAME; by default gcloud's region and those of the submissions from
    this folder. Raises UserError if there is no such job.
    """
    # A job of a submission from this folder; one that was interrupted is found by its label.
    attempt = find_attempt(job)
    name = job
    if attempt:
        record, newest = attempt
        if not newest.job and newest.state != "NOT SUBMITTED" and newest.sent_at:
            opened = Platform(newest.project, newest.region)
            with api_errors(opened.gcp):
                newest.job = look_for(record.label, opened, newest.sent_at)
            record.write()
        if not newest.job:
            raise UserError(
                f"submission {record.submission} has no job in {newest.region}"
                f" ({newest.error or 'it was not requested'}): submit it again, or see `python -m"
                " deploy jobs`"
            )
        name = newest.job
    # A job by its resource name, or by its number.
    full_name = re.fullmatch(r"projects/([^/]+)/locations/([^/]+)/customJobs/\d+", name)
    in_name = full_name[1] if full_name else ""
    if not project:  # some services reject a project's number, so gcloud's project comes first
        recorded = attempt[1].project if attempt else "" if in_name.isdecimal() else in_name
        project = recorded or read_project("") or in_name
    if full_name:
        return VertexJob(name, Platform(project, full_name[2]), attempt)
    regions = _regions(region)
    forms = (
        "its name, display name, number or submission with --project and --region; `python -m"
        " deploy jobs` lists all"
    )
    if not name:
        raise UserError(f"nothing was submitted from this folder: give {forms}")
    if not project or not regions:
        raise UserError(f"job {job!r} is not recorded in this folder: give {forms}")
    if name.isdecimal() and len(regions) == 1:
        name = f"projects/{project}/locations/{regions[0]}/customJobs/{name}"
        return VertexJob(name, Platform(project, regions[0]))
    # A job that another folder or machine sent.
    for place in regions:
        opened = Platform(project, place)
        with api_errors(opened.gcp):
            attempt = find_elsewhere(name, opened)
        if attempt:
            return VertexJob(attempt[1].job, opened, attempt)
    raise UserError(
        f"job {job!r}: neither this folder nor {', '.join(regions)} has it: give {forms}"
    )


def _regions(flag: str) -> list[str]:
    """Returns the regions in `flag`, or else gcloud's region and those of the submissions from this
    folder."""
    names = [flag or read_region("")]
    if not flag:
        names += [attempt.region for record in submissions() for attempt in record.attempts[::-1]]
    regions = ",".join(filter(None, names))
    return regions_in(regions) if regions else []


@options_class
class JobsOptions:
    """Holds the options of `jobs`."""

    project: str = setting("", "Google Cloud project (default: gcloud's)", "ID")
    region: str = setting(
        "",
        "regions to search (default: gcloud's ai/region, and those of the submissions from this"
        " folder)",
        "NAME,NAME",
    )
    state: str = setting("", "only those in this state, as RUNNING", "STATE", choices=STATES)
    labels: Mapping[str, str] = setting(
        {}, "only those with these labels, as user=ana", "KEY=VALUE,…"
    )
    limit: int = setting(50, "the newest of each region", "COUNT", minimum=1, maximum=10_000)

    def __post_init__(self) -> None:
        """Raises UserError for malformed labels."""
        check_labels(self.labels)


JOBS = verb_usage(
    "jobs", "[--region=NAME,NAME]", "Lists the jobs that this package submitted, region by region."
)


def jobs(
    region: str | Sequence[str] | None = None,
    stream: TextIO | None = None,
    **options: Value,
) -> list[JobStatus]:
    """Returns the newest jobs of each region.

    `options`: fields of JobsOptions, such as state="RUNNING" or limit.

    Also cancels duplicates, second jobs that were created because a response was lost, and prints
    so on `stream`.
    """
    named = {"region": region, **options}
    values = {name: value for name, value in named.items() if value is not None}
    filters, _ = read_values(JobsOptions, values, JOBS)
    with printed_on(stream):
        statuses = list[JobStatus]()
        for _, newest, _ in jobs_by_region(filters):
            statuses += newest
        return statuses


def jobs_by_region(options: JobsOptions) -> Iterator[tuple[str, list[JobStatus], int]]:
    """Yields each region's name, the jobs that `jobs` returns for it, and how many it has."""
    newest_sent = find_attempt("")
    project = read_project(options.project)
    project = project or needed_project(newest_sent[1].project if newest_sent else "")
    for region in _regions(options.region) or [needed_region("")]:
        backend = Platform(project, region)
        with api_errors(backend.gcp):
            statuses = retried(backend.jobs)
            # by label: the jobs of one attempt of a submission
            groups: dict[str, list[JobStatus]] = {}
            for status in statuses:
                groups.setdefault(status.labels.get(LABEL, status.name), []).append(status)
            for group in groups.values():
                cancel_duplicates(group, backend)
        newest = sorted(statuses, key=lambda status: status.created or 0.0, reverse=True)
        if options.state:
            newest = [status for status in newest if status.state == options.state]
        wanted = options.labels.items()
        newest = [status for status in newest if wanted <= status.labels.items()][: options.limit]
        yield region, [*map(with_stop_reason, newest)], len(statuses)
