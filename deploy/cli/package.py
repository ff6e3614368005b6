"""Builds and uploads the packages of a job, each once: `python -m deploy package --bucket=gs://…`."""

from collections.abc import Sequence

from deploy.client.arguments import add_flags, parser
from deploy.tiers.gcp_config import checked_address, needed_project, read_project
from deploy.tiers.packages import built, packages_with
from deploy.tiers.plain_image import starter
from deploy.tiers.script import read_script
from deploy.vertex.submission import upload_packages
from trainer.base.errors import DONE


def main(arguments: Sequence[str]) -> int:
    """Prints the addresses for packageUris."""
    cli = parser(
        "package", "Builds the trainer, and a package of yours, and stores them in a bucket.", "--bucket=gs://…"
    )
    add_flags(cli, "bucket", "package", "max_package_mb", "project", "script", "module")
    args = cli.parse_args(arguments)
    needed_project(read_project(args.project))
    bucket = checked_address("bucket", args.bucket)
    if args.script or args.module:
        packages = [built(read_script(args.script, args.module, args.package, ()).package(args.max_package_mb))]
    else:
        packages = list(map(built, packages_with(args.package, args.max_package_mb)))
    print("".join(f"{package.about}\n" for package in packages if package.about), end="", flush=True)
    upload_packages([*packages, starter()], bucket)
    return DONE
