"""Declares the flags of a job that is submitted, and reads them into JobOptions and SpecChanges."""

import argparse
import re
import secrets
import time
from collections.abc import Sequence

from deploy.tiers.images import check_asked_image, installs, remembered
from deploy.tiers.job_request import JobOptions
from deploy.tiers.job_spec import Program
from deploy.tiers.packages import Package, packages_with
from deploy.tiers.script import Script
from deploy.tiers.spec_changes import SpecChanges, read_labels, read_secrets, read_variables
from trainer.base.errors import UserError
from trainer.base.settings.fields import Parser

# Flags that change any tier, for `read_changes`, and the labels and the key of its jobs.
CHANGES = (
    "timeout", "flex_start", "spot", "disk_gb", "reservation", "labels", "kms_key", "service_account", "network",
    "env", "web_access",
)  # fmt: skip
# Flags of jobs of Vertex AI, wherever they are submitted from.
OF_VERTEX = (
    "project", "region", "bucket", "package", "image", "max_cost", "stop_if_idle", "stop_if_over", "max_wait",
    *CHANGES, "secret", "backend",
)  # fmt: skip


def read_changes(args: argparse.Namespace) -> SpecChanges:
    """Returns what the flags change in the spec of every tier. Raises UserError if they contradict each other."""
    kinds = [name for name in ("spot", "flex_start", "reservation") if getattr(args, name)]
    if len(kinds) > 1:
        raise UserError(f"--{kinds[0]} and --{kinds[1]} contradict each other: a job has machines of one kind")
    if args.reservation and not re.fullmatch(r"projects/[^/]+/zones/[a-z0-9-]+/reservations/[^/]+", args.reservation):
        raise UserError(f"reservation={args.reservation}: write projects/PROJECT/zones/ZONE/reservations/NAME")
    env, secret = read_variables(args.env), read_secrets(getattr(args, "secret", []))
    return SpecChanges(
        args.service_account, args.network, args.spot, args.flex_start, args.timeout, args.disk_gb,
        args.reservation, args.web_access, env, secret,
    )  # fmt: skip


def add_plan_flags(cli: Parser) -> None:
    """Declares the flags by which a job is held against its plan before it is sent."""
    cli.add_boolean("plan", "first measure on this machine's CPU whether the run fits the memory, if nobody did yet")
    cli.add_boolean("force", "send a job that does not fit the memory by its plan, or a script that imports "
                    "what its image has not")  # fmt: skip


def read_options(args: argparse.Namespace, program: Program) -> JobOptions:
    """Returns the options of a new submission, its packages read. Raises UserError if they do not fit."""
    check_asked_image(args.image)
    if args.name and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", args.name):
        raise UserError(f"name={args.name}: use letters, digits, - _ and . only, at most 100: it names a folder too")
    own_image = args.image != "" and not installs(args.image)
    if isinstance(program, Script):
        subject = program.subject
        packages: Sequence[Package] = [program.package(args.max_package_mb)]
    elif own_image and args.package:
        raise UserError("--image and --package contradict each other: build the package into the image")
    else:
        packages = [] if own_image else packages_with(args.package, args.max_package_mb)
        subject = str(program.values.get("recipe") or program.values.get("model") or "job")
        subject = subject.rsplit("/", 1)[-1].removesuffix(".yaml").replace("_", "-").replace(":", "-")
    return JobOptions(
        subject, new_submission(), args.name, tuple(packages), args.image, None if args.image else remembered(),
        args.max_cost, args.max_wait, args.disable_retries, read_labels(args.labels), args.kms_key,
        tensorboard=getattr(args, "tensorboard_instance", ""),
        force=getattr(args, "force", False), stop_if_idle_s=args.stop_if_idle, stop_if_over=args.stop_if_over,
        plan=getattr(args, "plan", "") is True,
    )  # fmt: skip


def new_submission() -> str:
    """Returns a unique name for a submission that can be a label: time and random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
