"""Finds the job that a command refers to, from its arguments and this folder's history."""

import argparse
import dataclasses
import re

from deploy.cli.arguments import add_flags
from deploy.tiers.gcp_config import GcpConfig, checked_region, read_project, read_region
from deploy.vertex.api import CUSTOM, TUNING, JobStatus
from deploy.vertex.history import Attempt, Submission, find_attempt, record_status
from deploy.vertex.rest import Backend
from deploy.vertex.session import BACKENDS, Session
from trainer.base.errors import UserError


@dataclasses.dataclass(frozen=True)
class Target:
    """Holds a job's full name, its project and region, and its local record, if there is one."""

    backend: str
    job: str
    gcp: GcpConfig
    attempt: tuple[Submission, Attempt] | None

    def open(self, session: Session) -> Backend:
        """Opens the backend for the job's project and region."""
        return session.open(self.backend, self.gcp.project, self.gcp.region)

    def record(self, status: JobStatus, session: Session) -> None:
        """Stores the final status in the local record, if there is one."""
        if self.attempt:
            record_status(*self.attempt, status, session.clock.now())


def add_backend(cli: argparse.ArgumentParser) -> None:
    """Adds the flag --backend."""
    cli.add_argument("--backend", choices=BACKENDS, default="gcloud", help="gcloud (default), or Google's Python SDK")


def add_target(cli: argparse.ArgumentParser) -> None:
    """Adds the arguments of `find_target`."""
    cli.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="its name, number or submission (default: the last)"
    )
    add_flags(cli, "project")
    cli.add_argument("--region", default="", metavar="NAME", help="region of the job, if only its number is given")
    add_backend(cli)


def find_target(args: argparse.Namespace) -> Target:
    """Returns the requested job; UserError if it is neither given by its full name nor recorded in this folder."""
    try:
        found = find_attempt(args.job)
    except LookupError:
        found = None
    if found and not found[1].job:
        raise UserError(
            f"submission {found[0].submission} has no job ({found[1].error or 'no response'}): "
            "see `python -m deploy jobs`"
        )
    job = found[1].job if found else args.job
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
    return Target(args.backend, name, GcpConfig(project, region, ""), found)


def _project(name: str) -> str:
    """Returns the project ID in a job's name; if it is a number, which some services reject, gcloud's project."""
    return name if name and not name.isdecimal() else read_project("") or name
