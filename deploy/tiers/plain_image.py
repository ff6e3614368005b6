"""Makes a task run in a plain Python image: at its start it installs TensorFlow, CUDA and the packages.

A program does that, the starter, which lies in the bucket beside the packages, named by its SHA-256.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.tiers.packages import ADMITTED, Package
from deploy.tiers.tier import Tier
from trainer.base.run_files.plan_file import versions

IN_JOB = Path(__file__).parents[1] / "in_job"
# The command of a job: reads the starter with a token of the job's account, checks its SHA-256 and runs it.
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
exec(text if hashlib.sha256(text).hexdigest() in name else sys.exit(f"error: {name}: its SHA-256 is another now"))
"""  # noqa: E501 (few lines that can be read as they are)
# Where Google's machines mount the driver, which images with CUDA know and a plain one does not.
_DRIVER = {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib",
           "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}  # fmt: skip
# The files that pip chooses for Python 3.12, of 2026-11-22: with CUDA measured, without estimated. The minutes are a
# guess, at 50 MB/s.
_GB, _MINUTES = {True: 3.5, False: 0.7}, {True: 4, False: 2}


@dataclasses.dataclass(frozen=True)
class Starter(Package):
    """Holds the program that prepares a job's machine: one file, stored as it is."""

    def build(self) -> Path:
        return IN_JOB / "starter.py"

    def uri(self, bucket: str) -> str:
        return f"{bucket}/packages/{self.sha256}/starter.py"


def starter() -> Starter:
    """Returns the starter of this version."""
    content = (IN_JOB / "starter.py").read_bytes()
    return Starter("starter", "0", {"starter.py": content}, sha256=hashlib.sha256(content).hexdigest())


def write_start(task: dict[str, Any], plan: Mapping[str, Any], gpus: int, bucket: str) -> None:
    """Makes a containerSpec begin with the starter, which gets `plan`. The tier's own variables win.

    `gpus`: of a machine whose image does not know where the driver is.
    """
    drivers = _DRIVER if gpus else {}
    variables = {"TRAINER_START": json.dumps({"gpus": gpus, **plan}), "PYTHONUNBUFFERED": "1", **drivers}
    of_tier = {variable["name"]: variable for variable in task.get("env", [])}
    task["command"] = ["python3", "-c", START, starter().uri(bucket)]
    added = [{"name": name, "value": value} for name, value in variables.items() if name not in of_tier]
    task["env"] = [*added, *of_tier.values()]


def requirements(gpus: int) -> list[str]:
    """Returns what pip installs beside the packages, on a machine with so many GPUs."""
    extras = {"tensorflow": "[and-cuda]"} if gpus else {}
    return [f"{name}{extras.get(name, '')}=={version}" for name, version in versions_there().items()]


def versions_there() -> dict[str, str]:
    """Returns the TensorFlow and Keras that a job installs, as pip takes them: those of this machine.

    So each restart has the same, and a job runs what was tried here. In place of one that is not admitted, or that is
    no release, it has the newest minor that was tried. Python 3.11 to 3.13 have all that are admitted.
    """
    from packaging.specifiers import SpecifierSet  # TensorFlow and Keras need it too

    there = {}
    for name, admitted in ADMITTED.items():
        here = versions().get(name, "")
        major, minor = admitted.rpartition("<")[2].split(".")
        released = re.fullmatch(r"[\d.]+", here) and here in SpecifierSet(admitted)
        there[name] = here if released else f"{major}.{int(minor) - 1}.*"
    return there


def install_seconds(gpus: int) -> float:
    """Returns how long each worker with so many GPUs installs at each start; a guess."""
    return 60.0 * _MINUTES[bool(gpus)]


def about_installing(tier: Tier, image: str, network: bool) -> str:
    """Returns one line on what the installation in a plain Python image takes at each start."""
    gpus, seconds = bool(tier.accelerators), install_seconds(tier.accelerators)
    usd = tier.price_per_hour and tier.price_per_hour * seconds / 3600
    cost = "" if usd is None else f", about {usd:.2f} USD"
    way = ": with --network= it needs a way out, as Cloud NAT (docs/vertex.md)" if network else ""
    unfit = " and ".join(
        f"{name} {versions().get(name, '(missing)')}" for name, there in versions_there().items() if "*" in there
    )
    why = f", the newest tried, as a job cannot have the {unfit} of this machine," if unfit else ", as here,"
    return (
        f"runs in {image}: each worker installs {' '.join(requirements(tier.accelerators))}{why} at each start: "
        f"{_GB[gpus]} GB from pypi.org, some {seconds / 60:.0f} minutes{cost} (not measured on Vertex AI){way}"
    )
