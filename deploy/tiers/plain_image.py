"""Makes a task run in a plain Python image: at its start it installs TensorFlow, CUDA and the packages."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.tiers.packages import Package
from deploy.tiers.tier import Tier

TENSORFLOW = "2.21.*"
IN_JOB = Path(__file__).parents[1] / "in_job"
STARTER = IN_JOB / "starter.py"
# Where Google's machines mount the driver, which images with CUDA know and a plain one does not.
_DRIVER = {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib",
           "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}  # fmt: skip
# The files that pip chooses for Python 3.12, of 2026-11-22: with CUDA measured, without estimated. The minutes are a
# guess, at 50 MB/s.
_GB, _MINUTES = {True: 3.5, False: 0.7}, {True: 4, False: 2}


def driver_variables(gpus: int) -> dict[str, str]:
    """Returns the variables by which a plain image finds the driver of a machine with so many GPUs."""
    return _DRIVER if gpus else {}


def requirements(gpus: int) -> list[str]:
    """Returns what pip installs beside the packages, on a machine with so many GPUs."""
    return [f"tensorflow{'[and-cuda]' if gpus else ''}=={TENSORFLOW}"]


def run_in_plain_image(task: dict[str, Any], module: str, gpus: int, packages: Sequence[Package], bucket: str) -> None:
    """Changes a containerSpec so that it installs all that is needed, and then runs the module with its arguments."""
    sources = [[package.uri(bucket), package.sha256] for package in packages]
    plan = {"gpus": gpus, "requirements": requirements(gpus), "packages": sources, "module": module}
    variables = {"TRAINER_START": json.dumps(plan), "PYTHONUNBUFFERED": "1", **driver_variables(gpus)}
    before = {variable["name"]: variable for variable in task.get("env", [])}
    task["command"] = ["python", "-c", STARTER.read_text(encoding="utf-8")]
    task["env"] = [*({"name": name, "value": value} for name, value in variables.items() if name not in before),
                   *before.values()]  # fmt: skip


def install_seconds(gpus: int) -> float:
    """Returns how long each worker with so many GPUs installs at each start; a guess."""
    return 60.0 * _MINUTES[bool(gpus)]


def about_installing(tier: Tier, image: str, network: bool) -> str:
    """Returns one line on what the installation in a plain Python image takes at each start."""
    gpus, seconds = bool(tier.accelerators), install_seconds(tier.accelerators)
    usd = tier.price_per_hour and tier.price_per_hour * seconds / 3600
    cost = "" if usd is None else f", about {usd:.2f} USD"
    way = ": with --network= it needs a way out, as Cloud NAT (docs/vertex.md)" if network else ""
    return (
        f"runs in {image}: each worker installs {requirements(tier.accelerators)[0]} at each start: {_GB[gpus]} GB "
        f"from pypi.org, some {seconds / 60:.0f} minutes{cost} (not measured on Vertex AI){way}"
    )
