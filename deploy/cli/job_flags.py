"""Declares the flags of a job that is submitted, and reads them into JobOptions."""

import argparse
import re
import secrets
import time

from deploy.cli.arguments import add_flags, command_line
from deploy.spec.job_spec import Job, JobOptions
from deploy.spec.packages import packages_with
from deploy.spec.sources import MOST_MB
from deploy.spec.spec_rules import check_image
from trainer.config.flags import Parser
from trainer.config.overrides import Overrides
from trainer.errors import UserError


def add_job_flags(own: Parser) -> None:
    """Declares the flags of one job; `read_options` reads them."""
    own.add_argument("tier", metavar="TIER", help="a file such as job_configs/l4x4.yaml, or its bare name, l4x4")
    add_submission_flags(own)
    own.add_argument("--name", default="", metavar="TEXT", help="display name (default: recipe, tier and time)")
    own.add_boolean("disable_retries", "no restart on failure, as measurements need it")


def add_submission_flags(own: Parser) -> None:
    """Declares the flags that apply to one job and to the jobs of a comparison alike."""
    add_flags(own, "project", "region", "bucket", "package", "max_package_mb", "prices")
    own.add_argument("--image", default="", metavar="URI", help="your own image instead of the tier's prebuilt one")
    own.add_argument("--max_cost", type=_usd, metavar="USD", help="the most that a job may cost (each job of a "
                     "comparison): it is stopped after as many hours as that pays for")  # fmt: skip


def add_plan_flags(own: Parser) -> None:
    """Declares the flags by which a job is held against its plan before it is sent."""
    own.add_boolean("plan", "first measure on this machine's CPU whether the run fits the memory, if nobody did yet")
    own.add_boolean("force", "send a job that does not fit the memory by its plan")


def read_options(asked: argparse.Namespace, overrides: Overrides) -> JobOptions:
    """Returns the options of a new submission, its packages read. Raises UserError if they do not fit."""
    if asked.image and asked.package:
        raise UserError("--image and --package contradict each other: build the package into the image")
    if asked.image and "/" not in check_image("image", asked.image):
        raise UserError(
            f"image={asked.image}: it names no repository: write REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME"
        )
    if asked.name and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", asked.name):
        raise UserError(f"name={asked.name}: use letters, digits, - _ and . only, at most 100: it names a folder too")
    packages = () if asked.image else tuple(packages_with(asked.package, asked.max_package_mb))
    subject = str(overrides.values.get("recipe") or overrides.values.get("model") or "job")
    subject = subject.rsplit("/", 1)[-1].removesuffix(".yaml").replace("_", "-").replace(":", "-")
    return JobOptions(
        subject, new_submission(), asked.name, packages, asked.image, asked.max_cost,
        disable_retries=asked.disable_retries,
    )  # fmt: skip


def package_command(job: Job, asked: argparse.Namespace) -> str:
    """Returns the shell command that uploads the packages of `job`; empty if there are none."""
    if not job.packages:
        return ""
    given = {"bucket": job.gcp.bucket, "project": job.gcp.project, "package": asked.package}
    given["max_package_mb"] = "" if asked.max_package_mb == MOST_MB else asked.max_package_mb
    return command_line("package", [f"--{name}={value}" for name, value in given.items() if value])


def new_submission() -> str:
    """Returns a unique name for a submission that can be a label: time and random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def seconds(text: str) -> float:
    """Returns the seconds in a time such as 2h, 30m or 1d; an argparse type."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhd])", text)
    value = float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]] if found else 0.0
    if not 1 <= value <= 30 * 86400:
        raise argparse.ArgumentTypeError(f"{text!r} must be a time of up to 30 days with its unit, as 30m, 2h or 1d")
    return value


def _usd(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, in USD, as --max_cost=5")
    return value
