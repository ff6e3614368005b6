"""The job that a command line asks for: its flags, and what they make."""

import argparse
import re
import secrets
import time
from collections.abc import Sequence

from deploy.cli.arguments import add_flags, command_line
from deploy.spec.gcp_config import GcpConfig
from deploy.spec.job_spec import Job, JobOptions, render
from deploy.spec.packages import packages_with
from deploy.spec.tier import Tier
from trainer.errors import UserError


def add_job_flags(own: argparse.ArgumentParser) -> None:
    """The flags that say which job; `read_job` understands them."""
    own.add_argument("tier", metavar="TIER", help="a file such as job_configs/l4x4.yaml, or its bare name, l4x4")
    add_sending_flags(own)
    own.add_argument("--name", default="", metavar="TEXT", help="display name (default: recipe, tier and time)")
    own.add_argument("--disable_retries", action="store_true", help="no restart on failure, as measurements want it")


def add_sending_flags(own: argparse.ArgumentParser) -> None:
    """Those that are the same for any number of jobs."""
    add_flags(own, "project", "region", "bucket", "package", "prices")
    own.add_argument("--image", default="", metavar="URI", help="your own image instead of the tier's prebuilt one")
    own.add_argument("--max_cost", type=_usd, metavar="USD", help="the most that a job may cost, "
                     "each job of a comparison: it is ended after as many hours as that pays for")  # fmt: skip


def read_job(asked: argparse.Namespace, flags: Sequence[str], gcp: GcpConfig, tier: Tier, submission: str) -> Job:
    """The job on `tier` in `gcp`; UserError for one that is known to fail."""
    if asked.image and asked.package:
        raise UserError("--image and --package contradict each other: build the package into the image")
    packages = [] if asked.image else packages_with(asked.package)
    if asked.name and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", asked.name):
        raise UserError(f"name={asked.name}: letters, digits, - _ and . only, at most 100: it names a folder too")
    subject = _subject(flags)
    name = asked.name or f"{subject}-{tier.name}-{submission}"
    # Without the tier: the next tier of a fallback goes on from the checkpoints of the last.
    folder = asked.name or f"{subject}-{submission}"
    wanted = JobOptions(name, folder, tuple(packages), asked.image, asked.max_cost, asked.disable_retries)
    return render(tier, flags, gcp, wanted)


def package_command(job: Job, folder: str) -> str:
    """What a user types into a shell to send the packages of `job`, of which `folder` is theirs; empty without any."""
    if not job.packages:
        return ""
    given = {"bucket": job.gcp.bucket, "project": job.gcp.project, "package": folder}
    return command_line("package", [f"--{name}={value}" for name, value in given.items() if value])


def new_submission() -> str:
    """A name for one submission, fit for a label: time and chance."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _subject(flags: Sequence[str]) -> str:
    values = dict(flag[2:].split("=", 1) for flag in flags if "=" in flag)
    named = values.get("recipe") or values.get("model") or "job"
    return named.rsplit("/", 1)[-1].removesuffix(".yaml").replace("_", "-").replace(":", "-")


def _usd(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, in USD, as --max_cost=5")
    return value
