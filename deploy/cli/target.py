"""Finds the job that a command refers to, from its arguments, this folder's history, and the label of a submission."""

import argparse
import dataclasses
import re

from deploy.cli.arguments import add_flags
from deploy.tiers.gcp_config import GcpConfig, checked_region, read_project, read_region
from deploy.vertex.api import CUSTOM, TUNING, JobStatus
from deploy.vertex.creation import look_for
from deploy.vertex.errors import exit_on_api_error
from deploy.vertex.history import Attempt, Submission, find_attempt, record_status
from deploy.vertex.rest import Backend
from deploy.vertex.session import Session
from trainer.base.errors import UserError
from trainer.base.settings.flags import Parser


@dataclasses.dataclass(frozen=True)
class Target:
    """Holds a job's full name, its project and region, and its local record, if there is one."""

    backend: Backend
    job: str
    gcp: GcpConfig
    attempt: tuple[Submission, Attempt] | None

    def record(self, status: JobStatus, session: Session) -> None:
        """Stores the final status in the local record, if there is one."""
        if self.attempt:
            record_status(*self.attempt, status, session.clock.now())


def add_target(cli: Parser) -> None:
    """Adds the arguments of `find_target`."""
    cli.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="its name, number or submission (default: the last)"
    )
    add_flags(cli, "project", "backend")
    cli.add_argument("--region", default="", metavar="NAME", help="region of the job, if only its number is given")


def find_target(args: argparse.Namespace, session: Session) -> Target:
    """Returns the requested job; UserError if it is neither given by its full name nor recorded in this folder."""
    try:
        found = find_attempt(args.job)
    except LookupError:
        found = None
    job = _job_of(*found, args.backend, session) if found else args.job
    full_name = re.fullmatch(rf"projects/([^/]+)/locations/([^/]+)/({CUSTOM.collection}|{TUNING.collection})/\d+", job)
    project = args.project or (found[1].project if found else "") or _project(full_name[1] if full_name else "")
    region = full_name[2] if full_name else read_region(args.region)
    forms = "projects/P/locations/R/customJobs/ID, or its number with --project and --region"
    if not job:
        raise UserError(
            f"nothing was submitted from this folder: give the job's name, as {forms}; `python -m deploy jobs` lists "
            "all jobs"
        )
    if not project or not region or not (full_name or job.isdecimal()):
        raise UserError(f"job {args.job!r} is not recorded in this folder: give its name, as {forms}")
    name = job if full_name else f"projects/{project}/locations/{checked_region(region)}/{CUSTOM.collection}/{job}"
    return Target(session.open(args.backend, project, region), name, GcpConfig(project, region, ""), found)


def _job_of(record: Submission, attempt: Attempt, backend: str, session: Session) -> str:
    """Returns the job's name; that of a submission that was interrupted is looked for by its label."""
    if attempt.job or attempt.state == "NOT SUBMITTED" or not attempt.sent_at:
        name = attempt.job
    else:
        with exit_on_api_error(GcpConfig(attempt.project, attempt.region, "")):
            opened = session.open(backend, attempt.project, attempt.region)
            name = attempt.job = look_for(record.label, opened, session.clock, attempt.sent_at)
        record.write()
    if not name:
        raise UserError(
            f"submission {record.submission} has no job in {attempt.region} "
            f"({attempt.error or 'it was not requested'}): submit it again, or see `python -m deploy jobs`"
        )
    return name


def _project(name: str) -> str:
    """Returns the project ID in a job's name; if it is a number, which some services reject, gcloud's project."""
    return name if name and not name.isdecimal() else read_project("") or name
