"""Chooses the image that a job runs in: that of --image=, the tier's, the one built in this folder,
or a plain one."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.packaging.distributions import PYTHON, about_versions, requirements
from deploy.packaging.packages import CodeArchive, Package
from deploy.tiers.spec_rules import check_format
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError
from trainer.base.storage import write_whole

# The values of --image= that are no addresses; each may have an address behind a colon.
INSTALL = "install"
AUTO = "auto"
TO_BUILD = "auto:"  # what AUTO becomes where its image is still to be built
# On Docker Hub;
# https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/containers-overview
PLAIN_IMAGE = f"python:{PYTHON}-slim"
IMAGE_RECORD = Path("runs/image.json")  # describes the image that was built in this folder


@dataclasses.dataclass(frozen=True)
class BuiltImage:
    """Holds what `python -m deploy image` built in this folder.

    `tag`: the address that the user gave, if `uri` has a digest instead; `tensorflow`: the
        TensorFlow package that pip installed, empty for the default; `sources`: the hash of each
        package in it, by the package's name; `time`: when it was built, in UTC, for people.
    """

    uri: str
    tensorflow: str
    sources: Mapping[str, str]
    time: str
    tag: str = ""

    def misfit(self, tier: Tier, packages: Sequence[Package]) -> str:
        """Returns why a job on `tier` with these packages cannot run in this image; "" if it
        can."""
        wheels = [package for package in packages if not isinstance(package, CodeArchive)]
        digests = {package.name: package.digest for package in wheels}
        if differing := self.sources.items() ^ digests.items():
            names = ", ".join(sorted({name for name, _ in differing}))
            return f"has other sources of {names} than this folder"
        without_cuda = self.tensorflow and "cuda" not in self.tensorflow
        return "has no CUDA" if tier.accelerators and without_cuda else ""


@dataclasses.dataclass(frozen=True)
class Image:
    """Holds the image that a job runs in.

    `uri`: its address; empty if the tier's file names the images.

    `plain`: the image has none of the job's packages, which each start of a worker installs;
        otherwise it has them all. `ready`: a plain one has what these packages require. `built`: it
        was built in this folder. `about`: a line for people on why that image was or was not
        chosen.
    """

    uri: str
    plain: bool = False
    ready: bool = False
    built: bool = False
    about: str = ""

    @property
    def installs(self) -> bool:
        """Returns whether each start of a worker installs what the job requires."""
        return self.plain and not self.ready


def choose_image(
    tier: Tier, image: str, built: BuiltImage | None, packages: Sequence[Package]
) -> Image:
    """Returns the image of a job on `tier`.

    `image`: the value of --image=; `built`: the image built in this folder.
    """
    kind, _, uri = image.partition(":")
    if kind == AUTO and uri:
        about = (
            f"runs in {uri}, which has all that this job requires: nothing is installed from PyPI"
        )
        return Image(uri, plain=True, ready=True, about=about)
    if installs(image):
        return Image(uri or PLAIN_IMAGE, plain=True)
    if image:
        return Image(image)
    if "containerSpec" in tier.spec["workerPoolSpecs"][0]:
        return Image("")
    if not built:
        return Image(PLAIN_IMAGE, plain=True)
    if misfit := built.misfit(tier, packages):
        about = (
            f"{built.uri}, built in this folder, {misfit}: not used; build it again, or use"
            " --image="
        )
        return Image(PLAIN_IMAGE, plain=True, about=about)
    tag = f" as {built.tag}" if built.tag else ""
    about = f"runs in {built.uri}, built in this folder{tag} on {built.time} from these sources"
    return Image(built.uri, built=True, about=about)


def installs(image: str) -> bool:
    """Returns whether the value of --image= asks for a plain Python image: `install` or `auto`, or
    `install:URI` to choose it."""
    return image.partition(":")[0] in (INSTALL, AUTO)


def check_image(image: str) -> None:
    """Raises UserError unless the value of --image= is empty, `install`, `auto`, or the address of
    an image in a repository."""
    if image in ("", INSTALL, AUTO):
        return
    uri = image.removeprefix(f"{INSTALL}:").removeprefix(f"{AUTO}:")
    check_format("ContainerSpec.imageUri", uri, "image")
    if "/" not in uri and not installs(image):
        raise UserError(
            f"image={image}: it names no repository: write"
            f" REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME, {INSTALL} or {AUTO}"
        )


def remember(image: BuiltImage) -> None:
    """Writes runs/image.json, from which `remembered` reads the image that was built in this
    folder."""
    IMAGE_RECORD.parent.mkdir(parents=True, exist_ok=True)
    write_whole(IMAGE_RECORD, json.dumps(dataclasses.asdict(image), indent=2) + "\n")


def remembered() -> BuiltImage | None:
    """Returns the image that was built in this folder, None without one.

    Raises UserError for a damaged record.
    """
    try:
        return BuiltImage(**json.loads(IMAGE_RECORD.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{IMAGE_RECORD}: not a record of an image ({error}): remove it") from None


IN_JOB = Path(__file__).parents[1] / "in_job"
# The command of a job: downloads the bootstrap with a token of the job's account, checks its
# SHA-256 and runs it.
START = """\
import hashlib, json, os, sys, time, urllib.parse, urllib.request
def read(url, headers):
    for pause in (2, 4, 8, 16, 0):
        try: return urllib.request.urlopen(urllib.request.Request(url, None, headers), timeout=60).read()
        except OSError as error: time.sleep(pause) if pause else sys.exit(f"error: {url}: {error}: may the job's account read it?")
(_, _, bucket, name), storage = sys.argv.pop(1).split("/", 3), os.environ.get("STORAGE_EMULATOR_HOST", "https://storage.googleapis.com")
account = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal") + "/computeMetadata/v1/instance/service-accounts"
token = json.loads(read(f"http://{account}/default/token", {"Metadata-Flavor": "Google"}))["access_token"]
text = read(f"{storage}/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, '')}?alt=media", {"Authorization": f"Bearer {token}"})
exec(text if hashlib.sha256(text).hexdigest() in name else sys.exit(f"error: {name}: its SHA-256 has changed"))
"""  # noqa: E501 (few lines that can be read as they are)
# Where Google's machines mount the GPU driver. Images with CUDA set these variables; a plain Python
# image does not.
_DRIVER = {
    "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}
# What pip downloads for Python 3.12 with CUDA (True; measured on 2026-11-22) and without (False;
# estimated), and how long the installation takes: a guess, at 50 MB/s.
_INSTALL_GB = {True: 3.5, False: 0.7}
_INSTALL_MINUTES = {True: 4, False: 2}


@dataclasses.dataclass(frozen=True)
class Bootstrap(Package):
    """Represents the program that prepares a job's machine: one file, which is uploaded as it
    is."""

    def build(self) -> Path:
        return IN_JOB / "bootstrap.py"

    def uri(self, bucket: str) -> str:
        return f"{bucket}/packages/{self.sha256}/bootstrap.py"


BOOTSTRAP = Bootstrap("bootstrap", "0", {})


def write_start(task: dict[str, Any], plan: Mapping[str, Any], gpus: int, bucket: str) -> None:
    """Makes the bootstrap the command of a containerSpec; the tier's own variables win.

    plan: what the bootstrap gets.
    gpus: the GPUs of the machine if its image does not say where their driver is, else 0.
    """
    variables = {"TRAINER_START": json.dumps({"gpus": gpus, **plan}), "PYTHONUNBUFFERED": "1"}
    if gpus:
        variables |= _DRIVER
    task["command"] = ["python3", "-c", START, BOOTSTRAP.uri(bucket)]
    set_variables(task, variables, replace=False)


def set_variables(task: dict[str, Any], variables: Mapping[str, str], *, replace: bool) -> None:
    """Adds environment variables to a task of a spec.

    `replace`: they win over the task's own of the same names.
    """
    of_task = {variable["name"]: variable.get("value", "") for variable in task.get("env", [])}
    values = {**of_task, **variables} if replace else {**variables, **of_task}
    task["env"] = [{"name": name, "value": value} for name, value in values.items()]


def install_seconds(gpus: int) -> float:
    """Returns a guess of the seconds that a worker with this number of GPUs spends on installation
    at each start."""
    return 60.0 * _INSTALL_MINUTES[bool(gpus)]


def about_installing(tier: Tier, image: str, network: bool, more: Sequence[str] = ()) -> str:
    """Returns a line on what each start in a plain Python image installs, with its size, time and
    cost.

    `network`: whether the job has --network=; `more`: what it installs besides TensorFlow and
        Keras.
    """
    has_gpus = bool(tier.accelerators)
    seconds = install_seconds(tier.accelerators)
    usd = tier.price_per_hour and tier.price_per_hour * seconds / 3600
    cost = "" if usd is None else f", about {usd:.2f} USD"
    network_note = (
        ": with --network= it needs a way out, as Cloud NAT (docs/vertex.md)" if network else ""
    )
    lines = " ".join([*requirements(tier.accelerators), *more])
    return (
        f"runs in {image}: each worker installs {lines}{about_versions()} at each start:"
        f" {_INSTALL_GB[has_gpus]} GB from pypi.org, some {seconds / 60:.0f} minutes{cost} (not"
        f" measured on Vertex AI){network_note}"
    )
