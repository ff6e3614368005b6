"""Builds and uploads the packages of a job, each once: `python -m deploy package --bucket=gs://…`."""

import argparse
from collections.abc import Sequence

from deploy.cli.arguments import add_flags, add_script_flags, parser
from deploy.cli.target import add_backend
from deploy.tiers.gcp_config import GcpConfig, checked_address, needed_project, read_project
from deploy.tiers.packages import Package, built, packages_with
from deploy.tiers.plain_image import starter
from deploy.tiers.script import read_script
from deploy.vertex.errors import exit_on_api_error
from deploy.vertex.session import SESSION, Session
from deploy.vertex.submission import upload_packages
from trainer.base.errors import DONE


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Prints the addresses for packageUris."""
    cli = parser(
        "package", "Builds the trainer, and a package of yours, and stores them in a bucket.", "--bucket=gs://…"
    )
    add_flags(cli, "bucket", "package", "max_package_mb", "project")
    add_script_flags(cli)
    add_backend(cli)
    args = cli.parse_args(arguments)
    gcp = GcpConfig(needed_project(read_project(args.project)), "", checked_address("bucket", args.bucket))
    packages = _packages(args)
    print("".join(f"{package.about}\n" for package in packages if package.about), end="", flush=True)
    with exit_on_api_error(gcp):
        upload_packages(
            [*packages, starter()], gcp.bucket, session.open(args.backend, gcp.project, gcp.region), session.clock
        )
    return DONE


def _packages(args: argparse.Namespace) -> Sequence[Package]:
    """Returns the packages of a job that trains, or the one of a script."""
    if args.script or args.module:
        return [built(read_script(args.script, args.module, args.package, ()).package(args.max_package_mb))]
    return list(map(built, packages_with(args.package, args.max_package_mb)))
