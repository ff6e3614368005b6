"""Declares the flags of a job that is submitted, and reads them into JobOptions."""

import argparse
import re
import secrets
import time
from collections.abc import Sequence

from deploy.cli.arguments import add_flags, add_script_flags, command_line, factor, seconds, usd
from deploy.cli.target import add_backend
from deploy.tiers.images import INSTALL, PLAIN_IMAGE, check_asked_image, installs, remembered
from deploy.tiers.job_request import JobOptions
from deploy.tiers.job_spec import Job, Program
from deploy.tiers.packages import Package, packages_with
from deploy.tiers.script import Script
from deploy.tiers.sources import MOST_MB
from deploy.tiers.spec_changes import SpecChanges, read_labels
from trainer.base.errors import UserError
from trainer.base.settings.flags import Parser


def add_job_flags(cli: Parser) -> None:
    """Declares the flags of one job; `read_options` reads them."""
    cli.add_argument("tier", metavar="TIER", help="a file such as job_configs/l4x4.yaml, or its bare name, l4x4")
    add_submission_flags(cli)
    add_script_flags(cli)
    cli.add_argument("--name", default="", metavar="TEXT", help="display name (default: recipe, tier and time)")
    cli.add_argument("--tensorboard_instance", default="", metavar="NAME", help="the TensorBoard of Vertex AI that "
                     "shows the job's logs/: its full name or id, or `create`; it costs by what it stores")  # fmt: skip
    cli.add_boolean("disable_retries", "no restart on failure, as measurements need it")


def add_submission_flags(cli: Parser) -> None:
    """Declares the flags that apply to one job and to the jobs of a comparison alike."""
    add_flags(cli, "project", "region", "bucket", "package", "max_package_mb", "prices")
    cli.add_argument("--image", default="", metavar="IMAGE", help="the image that jobs run in: the URI of your own; "
                     f"{INSTALL}: a public Python image ({PLAIN_IMAGE}, or {INSTALL}:URI) in which TensorFlow and the "
                     f"packages are installed at each start (default: the "
                     f"tier's, else the one that `image` built in this folder, else {INSTALL})")  # fmt: skip
    add_tier_flags(cli)
    cli.add_argument("--max_cost", type=usd, metavar="USD", help="the most that a job may cost (each job of a "
                     "comparison, all trials of a study): it is stopped when that is spent")  # fmt: skip
    cli.add_argument("--stop_if_idle", type=seconds, default=0.0, metavar="TIME", help="the job saves and ends itself "
                     "when all its GPUs are below 10 %% for so long, as 30m")  # fmt: skip
    cli.add_argument("--stop_if_over", type=factor, default=0.0, metavar="FACTOR", help="the job saves and ends itself "
                     "after so many times the upper end of its plan, in hours or USD, as 1.5")  # fmt: skip


def add_tier_flags(cli: Parser) -> None:
    """Declares the flags that change any tier; `read_changes` and `read_options` read them."""
    cli.add_argument("--labels", default="", metavar="KEY=VALUE,…", help="labels of the jobs, as team=vision,cost=42")
    cli.add_argument("--kms_key", default="", metavar="NAME", help="your own key, which encrypts the jobs' disks: "
                     "projects/P/locations/REGION/keyRings/…/cryptoKeys/…")  # fmt: skip
    cli.add_argument("--service_account", default="", metavar="EMAIL", help="the account that the jobs run as")
    cli.add_argument("--network", default="", metavar="NAME", help="projects/NUMBER/global/networks/NAME, peered")
    cli.add_boolean("spot", "on spot machines: cheaper, and they may be taken away")
    cli.add_argument("--flex_start", type=seconds, metavar="TIME", help="as FLEX_START, which waits for machines, so "
                     "long at most, as 2h")  # fmt: skip


_OF_VERTEX = (
    "project", "region", "bucket", "package", "image", "max_cost", "backend", "stop_if_idle", "stop_if_over",
    "labels", "kms_key", "service_account", "network", "spot", "flex_start",
)  # fmt: skip


def add_place_flags(cli: Parser, jobs: str, dry_run: str, *, disable_retries: bool) -> None:
    """Declares where several runs take place, and the flags of `submit`. `jobs`, `dry_run`: for the help."""
    cli.add_argument("--on", choices=("local", "vertex"), default="local", help="processes of this machine (default), "
                     f"or {jobs}; the flags of `submit` say where")  # fmt: skip
    cli.add_boolean("dry_run", dry_run)
    add_submission_flags(cli)
    add_backend(cli)
    cli.set_defaults(name="", disable_retries=disable_retries, backend="")


def refuse_flags_of_vertex(asked: argparse.Namespace, *others: str) -> None:
    """Raises UserError if one of the flags that are for Vertex AI alone, or of `others`, is given."""
    for name in (*_OF_VERTEX, *others):
        if getattr(asked, name):
            raise UserError(f"--{name} is for jobs of Vertex AI: add --on=vertex, or leave it out")


def read_changes(asked: argparse.Namespace) -> SpecChanges:
    """Returns what the flags change in the spec of every tier. Raises UserError if they contradict each other."""
    if asked.spot and asked.flex_start:
        raise UserError("--spot and --flex_start contradict each other: drop one of them")
    if asked.flex_start and getattr(asked, "max_wait", None):
        raise UserError("--flex_start and --max_wait both limit the wait for machines: drop --max_wait")
    return SpecChanges(asked.service_account, asked.network, asked.spot, asked.flex_start)


def add_plan_flags(cli: Parser) -> None:
    """Declares the flags by which a job is held against its plan before it is sent."""
    cli.add_boolean("plan", "first measure on this machine's CPU whether the run fits the memory, if nobody did yet")
    cli.add_boolean("force", "send a job that does not fit the memory by its plan, or a script that imports "
                    "what its image has not")  # fmt: skip


def read_options(asked: argparse.Namespace, program: Program) -> JobOptions:
    """Returns the options of a new submission, its packages read. Raises UserError if they do not fit."""
    check_asked_image(asked.image)
    if asked.name and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", asked.name):
        raise UserError(f"name={asked.name}: use letters, digits, - _ and . only, at most 100: it names a folder too")
    own_image = asked.image != "" and not installs(asked.image)
    if isinstance(program, Script):
        subject = program.subject
        packages: Sequence[Package] = [program.package(asked.max_package_mb)]
    elif own_image and asked.package:
        raise UserError("--image and --package contradict each other: build the package into the image")
    else:
        packages = [] if own_image else packages_with(asked.package, asked.max_package_mb)
        subject = str(program.values.get("recipe") or program.values.get("model") or "job")
        subject = subject.rsplit("/", 1)[-1].removesuffix(".yaml").replace("_", "-").replace(":", "-")
    return JobOptions(
        subject, new_submission(), asked.name, tuple(packages), asked.image, None if asked.image else remembered(),
        asked.max_cost,
        stop_if_idle_s=asked.stop_if_idle, stop_if_over=asked.stop_if_over, plan=getattr(asked, "plan", False) is True,
        tensorboard=getattr(asked, "tensorboard_instance", ""),
        disable_retries=asked.disable_retries, labels=read_labels(asked.labels), kms_key=asked.kms_key,
        force=getattr(asked, "force", False),
    )  # fmt: skip


def package_command(job: Job, asked: argparse.Namespace) -> str:
    """Returns the shell command that uploads the packages of `job`; empty if there are none."""
    if not job.packages:
        return ""
    given = {"bucket": job.gcp.bucket, "project": job.gcp.project, "package": asked.package}
    given["max_package_mb"] = "" if asked.max_package_mb == MOST_MB else asked.max_package_mb
    given |= {"script": asked.script, "module": asked.module}
    return command_line("package", [f"--{name}={value}" for name, value in given.items() if value])


def new_submission() -> str:
    """Returns a unique name for a submission that can be a label: time and random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
