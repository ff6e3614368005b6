"""Builds a custom image with Cloud Build from a clean copy of the sources: `python -m deploy image
--image=URI`."""

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.api.request import verb_usage
from deploy.job.options import JobOptions
from deploy.packaging.image_choice import BuiltImage, remember
from deploy.packaging.packages import packages_with, write_copy
from deploy.platform.errors import JobUnknown
from deploy.platform.gcloud_and_sdk import not_installed
from deploy.tiers.gcp_config import read_project
from trainer.base.errors import DONE, FAULT, UserError
from trainer.base.settings.fields import options_class, parse_options, setting, setting_of
from trainer.base.storage.login import gcloud_environment

USAGE = verb_usage(
    "image",
    "--image=REGION-docker.pkg.dev/PROJECT/REPO/NAME:TAG",
    "Builds an image for --image= with Cloud Build.",
)


@options_class
class ImageFlags:
    """Holds the flags of `image`."""

    image: str = setting(meaning="its address in Artifact Registry, with a tag", metavar="URI")
    tensorflow: str = setting(
        "", "the package that pip installs, as tensorflow[and-cuda]==2.21.*, or tensorflow for CPUs"
    )
    package: str = setting_of(JobOptions, "package")
    max_package_mb: int = setting_of(JobOptions, "max_package_mb")
    include: tuple[str, ...] = setting_of(JobOptions, "include")
    force: bool = setting_of(JobOptions, "force")
    project: str = setting_of(JobOptions, "project")
    dry_run: bool = setting(False, "print the command and stop")


def main(arguments: Sequence[str]) -> int:
    """Prints the command, and runs it unless --dry_run is given."""
    args = parse_options(ImageFlags, arguments, USAGE)
    if not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+(/[a-z0-9._-]+){2,}:[\w.-]+", args.image):
        raise UserError(
            f"image={args.image}: use REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG"
        )
    packages = packages_with(args.package, args.max_package_mb, args.include, force=args.force)
    print("".join(f"# {package.about}\n" for package in packages if package.about), end="")
    folder = Path("dist/image")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)  # with only what the build needs
    for name in ("Dockerfile", "cloudbuild.yaml"):
        shutil.copyfile(Path(__file__).parents[1] / name, folder / name)
    for package in packages:
        write_copy(package, folder / "packages" / package.name)
    project = read_project(args.project)
    tensorflow = [f"_TENSORFLOW={args.tensorflow}"] if args.tensorflow else []
    # ^;^ allows commas within a substitution, as in versions. The last line is the digest of the
    # image: https://cloud.google.com/build/docs/api/reference/rest/v1/projects.builds#Results
    command = [
        "gcloud",
        "builds",
        "submit",
        *([f"--project={project}"] if project else []),
        f"--config={folder}/cloudbuild.yaml",
        f"--substitutions=^;^{';'.join([f'_IMAGE={args.image}', *tensorflow])}",
        "--format=value(results.images[0].digest)",
        str(folder),
    ]
    print(shlex.join(command), flush=True)
    if args.dry_run:
        return DONE
    line = ""
    try:
        with (
            gcloud_environment() as environment,
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as build,
        ):
            try:
                for line in build.stdout or ():
                    print(line, end="", flush=True)
            except KeyboardInterrupt:
                build.terminate()  # it is waited for when the block ends
                raise
    except FileNotFoundError:
        raise not_installed() from None
    except KeyboardInterrupt:
        raise JobUnknown(
            "stopped: the build may go on: look at"
            " https://console.cloud.google.com/cloud-build/builds before you start another"
        ) from None
    if build.returncode:
        return FAULT
    digest = line.strip() if re.fullmatch(r"sha256:[0-9a-f]{64}\s*", line) else ""
    sources = {package.name: package.digest for package in packages}
    uri = f"{args.image.rpartition(':')[0]}@{digest}" if digest else args.image
    built_at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    remember(BuiltImage(uri, args.tensorflow, sources, built_at, args.image if digest else ""))
    if not digest:
        print(
            f"warning: gcloud named no digest: jobs run in the image that {uri} names when they"
            " start"
        )
    print("jobs that are submitted in this folder, with these sources, run in this image")
    return DONE
