"""`python -m deploy image --image=URI`: your own image, built from a clean copy by Cloud Build, not here."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from deploy.cli.arguments import add_flags, parser
from deploy.spec.gcp_config import read_project
from deploy.spec.packages import DIST, Package, packages_with, write_copy
from deploy.vertex.gcloud import not_installed
from trainer.errors import DONE, FAULT, UserError

HERE = Path(__file__).parents[1]
_URI = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+(/[a-z0-9._-]+){2,}:[\w.-]+")
_TENSORFLOW = re.compile(r"tensorflow(\[and-cuda\])?([=<>~!]=?[\d.*]+(,[=<>~!]=?[\d.*]+)*)?")


def main(arguments: Sequence[str]) -> int:
    """Prints the command, and runs it unless --dry_run."""
    own = parser(
        "image", "Builds an image for --image= with Cloud Build.", "--image=REGION-docker.pkg.dev/PROJECT/REPO/NAME:TAG"
    )
    own.add_argument("--image", required=True, metavar="URI", help="where Artifact Registry keeps it, with a tag")
    own.add_argument(
        "--tensorflow",
        default="",
        metavar="TEXT",
        help="what pip installs, as tensorflow[and-cuda]==2.21.*, or tensorflow for CPUs",
    )
    add_flags(own, "package", "project")
    own.add_boolean("dry_run", "print the command and stop")
    asked = own.parse_args(arguments)
    if not _URI.fullmatch(asked.image):
        raise UserError(f"image={asked.image}: write REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG")
    if asked.tensorflow and not _TENSORFLOW.fullmatch(asked.tensorflow):
        raise UserError(
            f"tensorflow={asked.tensorflow}: write tensorflow or tensorflow[and-cuda], and a version as ==2.21.*"
        )
    packages = packages_with(asked.package)
    folder = DIST / "image"
    shutil.rmtree(folder, ignore_errors=True)
    write_context(packages, folder)
    command = build_command(asked.image, asked.tensorflow, read_project(asked.project), folder)
    print(shlex.join(command), flush=True)
    return DONE if asked.dry_run else _run(command)


def write_context(packages: Sequence[Package], folder: Path) -> None:
    """What the build needs, and nothing else: Dockerfile, Cloud Build's configuration, one folder a package."""
    folder.mkdir(parents=True)
    for name in ("Dockerfile", "cloudbuild.yaml"):
        shutil.copyfile(HERE / name, folder / name)
    for package in packages:
        write_copy(package, folder / "packages" / package.name)


def build_command(image: str, tensorflow: str, project: str, folder: Path) -> list[str]:
    """`gcloud builds submit` of the folder. ^;^: commas in a version do not part the substitutions."""
    substitutions = ";".join([f"_IMAGE={image}", *([f"_TENSORFLOW={tensorflow}"] if tensorflow else [])])
    where = [f"--project={project}"] if project else []
    config = f"--config={folder}/cloudbuild.yaml"
    return ["gcloud", "builds", "submit", *where, config, f"--substitutions=^;^{substitutions}", str(folder)]


def _run(command: Sequence[str]) -> int:
    try:
        done = subprocess.run(command)
    except FileNotFoundError:
        raise not_installed() from None
    return DONE if done.returncode == 0 else FAULT
