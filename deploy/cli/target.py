"""Which job a verb is about, from its arguments and this folder's history."""

import argparse
import dataclasses
import re

from deploy.cli.arguments import add_flags
from deploy.spec.gcp_config import GcpConfig, checked_region, read_project, read_region
from deploy.vertex.api import Backend
from deploy.vertex.history import Attempt, Submission, find
from deploy.vertex.session import BACKENDS, Session
from trainer.errors import UserError


@dataclasses.dataclass(frozen=True)
class Target:
    """A job that exists: its full name, where it is, and the local record of it, if there is one."""

    backend: str
    job: str
    gcp: GcpConfig
    kept: tuple[Submission, Attempt] | None

    def open(self, session: Session) -> Backend:
        """The service that knows the job."""
        return session.open(self.backend, self.gcp.project, self.gcp.region)


def add_backend(own: argparse.ArgumentParser) -> None:
    """The flag --backend."""
    own.add_argument("--backend", choices=BACKENDS, default="gcloud", help="gcloud (default), or Google's Python SDK")


def add_target(own: argparse.ArgumentParser) -> None:
    """The arguments that `find_target` understands."""
    own.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="its name, number or submission (default: the last)"
    )
    add_flags(own, "project")
    own.add_argument("--region", default="", metavar="NAME", help="of the job, where only its number is given")
    add_backend(own)


def find_target(asked: argparse.Namespace) -> Target:
    """The job asked for; UserError where it is neither named in full nor known from this folder."""
    try:
        kept = find(asked.job)
    except LookupError:
        kept = None
    if kept and not kept[1].job:
        raise UserError(
            f"submission {kept[0].submission} has no job ({kept[1].error or 'no answer came'}): "
            "see `python -m deploy jobs`"
        )
    job = kept[1].job if kept else asked.job
    named = re.fullmatch(r"projects/([^/]+)/locations/([^/]+)/customJobs/\d+", job)
    project = asked.project or (kept[1].project if kept else "") or _project(named[1] if named else "")
    region = named[2] if named else read_region(asked.region)
    if not job:
        raise UserError(
            "nothing was submitted from this folder: name the job, as projects/P/locations/R/customJobs/ID, or its "
            "number with --project and --region; `python -m deploy jobs` lists them"
        )
    if not project or not region or not (named or job.isdecimal()):
        raise UserError(
            f"job {asked.job!r} is not known here: give its name, as projects/P/locations/R/customJobs/ID, or its "
            "number with --project and --region"
        )
    name = job if named else f"projects/{project}/locations/{checked_region(region)}/customJobs/{job}"
    return Target(asked.backend, name, GcpConfig(project, region, ""), kept)


def _project(named: str) -> str:
    """The ID in a job's name; where that holds a number, which not all services take, gcloud's own project first."""
    return named if named and not named.isdecimal() else read_project("") or named
