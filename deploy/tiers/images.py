"""Chooses the image that a job runs in: that of --image=, the tier's, the one built in this folder, or a plain one."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.tiers.packages import Package
from deploy.tiers.spec_rules import check_format
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError
from trainer.base.storage import write_whole

INSTALL = "install"  # the value of --image= that is no address
# On Docker Hub; https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/containers-overview
PLAIN_IMAGE = "python:3.12-slim"
IMAGE_RECORD = Path("runs/image.json")  # of the image that was built in this folder


@dataclasses.dataclass(frozen=True)
class BuiltImage:
    """Holds what `python -m deploy image` built in this folder.

    `tensorflow`: the package that pip installed, empty for the default; `sources`: the hash of each package in it, by
    name; `time`: in UTC, for people; `tag`: the address that was asked for, where `uri` has a digest.
    """

    uri: str
    tensorflow: str
    sources: Mapping[str, str]
    time: str
    tag: str = ""

    def misfit(self, tier: Tier, packages: Sequence[Package]) -> str:
        """Returns why a job on `tier` with these packages cannot run in this image; empty if it can."""
        digests = {package.name: package.digest for package in packages}
        differing = sorted({name for name, _ in self.sources.items() ^ digests.items()})
        if differing:
            return f"has other sources of {', '.join(differing)} than this folder"
        return "has no CUDA" if tier.accelerators and self.tensorflow and "cuda" not in self.tensorflow else ""


@dataclasses.dataclass(frozen=True)
class Image:
    """Holds the choice of an image. `uri`: empty for those that the tier's file names.

    `plain`: it has Python alone, and each start installs the rest; otherwise it has all. `built`: whether it was built
    in this folder; `about`: for people, why it was or was not taken.
    """

    uri: str
    plain: bool = False
    built: bool = False
    about: str = ""


def choose_image(tier: Tier, image: str, built: BuiltImage | None, packages: Sequence[Package]) -> Image:
    """Returns the image of a job on `tier`. `image`: the value of --image=; `built`: what this folder remembers."""
    if installs(image):
        return Image(image.partition(":")[2] or PLAIN_IMAGE, plain=True)
    if image:
        return Image(image)
    if "containerSpec" in tier.spec["workerPoolSpecs"][0]:
        return Image("")
    misfit = built.misfit(tier, packages) if built else ""
    if built and not misfit:
        tag = f" as {built.tag}" if built.tag else ""
        about = f"runs in {built.uri}, built in this folder{tag} on {built.time} from these sources"
        return Image(built.uri, built=True, about=about)
    about = f"{built.uri}, built in this folder, {misfit}: not used; build it again, or use --image=" if built else ""
    return Image(PLAIN_IMAGE, plain=True, about=about)


def installs(image: str) -> bool:
    """Returns whether --image= asks for a plain Python image: `install`, or `install:URI` for one of the user's own."""
    return image == INSTALL or image.startswith(f"{INSTALL}:")


def check_asked_image(image: str) -> None:
    """Raises UserError unless --image= is `install`, or has the address of an image in a repository."""
    if image in ("", INSTALL):
        return
    uri = image.removeprefix(f"{INSTALL}:")
    check_format("ContainerSpec.imageUri", uri, "image")
    if "/" not in uri and not installs(image):
        raise UserError(
            f"image={image}: it names no repository: write REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME, or {INSTALL}"
        )


def remember(image: BuiltImage) -> None:
    """Replaces what this folder remembers."""
    IMAGE_RECORD.parent.mkdir(parents=True, exist_ok=True)
    write_whole(IMAGE_RECORD, json.dumps(dataclasses.asdict(image), indent=2) + "\n")


def remembered() -> BuiltImage | None:
    """Returns the image that was built in this folder, if any. Raises UserError if the record is damaged."""
    try:
        return BuiltImage(**json.loads(IMAGE_RECORD.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{IMAGE_RECORD}: not a record of an image ({error}): remove it") from None
