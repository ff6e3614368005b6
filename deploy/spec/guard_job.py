"""Describes the job that guards a persistent resource: a small machine that deletes it in the end."""

import json
from collections.abc import Mapping
from typing import Any

from deploy.spec.code_archive import CodeArchive
from deploy.spec.machine_table import load_machines
from deploy.spec.packages import Package
from deploy.spec.plain_image import IN_JOB, STARTER
from deploy.spec.tier import DISK

MACHINE = "n1-standard-4"
POLL_S = 60.0  # between the guard's looks
IDLE_S = 900.0  # without a job, after which the guard deletes the resource
_OURS = ("__init__.py", "starter.py", "job_files.py", "pool_guard.py")
_MAIN = b"import sys\n\nfrom in_job.pool_guard import main\n\nsys.exit(main())\n"


def guard_package() -> CodeArchive:
    """Returns the archive that the guard's job unpacks."""
    ours = {f"ours/in_job/{name}": IN_JOB / name for name in _OURS}
    return CodeArchive("guard", "0", {**ours, "ours/__main__.py": _MAIN})


def guard_price(price_file: str) -> float:
    """Returns USD an hour of the guard's machine."""
    for file in (price_file, ""):
        usd = load_machines(file).price(MACHINE, None, 0).list
        if usd is not None:
            return usd
    raise AssertionError("the table has its price")


def guard_spec(
    plan: Mapping[str, Any], run: Mapping[str, Any], package: Package, bucket: str, timeout_s: float
) -> dict[str, Any]:
    """Returns the CustomJobSpec of a guard with the plan of `deploy.in_job.pool_guard`.

    It has image, account and network of `run`, the spec of a job that it guards: they are known to work together.
    """
    task = run["workerPoolSpecs"][0]
    image = (
        task["containerSpec"]["imageUri"] if "containerSpec" in task else task["pythonPackageSpec"]["executorImageUri"]
    )
    code = [package.uri(bucket), package.sha256]
    start = {"gpus": 0, "packages": [], "code": code, "script": dict(plan)}
    variables = {"TRAINER_START": json.dumps(start), "PYTHONUNBUFFERED": "1"}
    container = {
        "imageUri": image,
        "command": ["python3", "-c", STARTER.read_text(encoding="utf-8")],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }
    pool = {"machineSpec": {"machineType": MACHINE}, "replicaCount": 1, "diskSpec": DISK, "containerSpec": container}
    kept = {key: run[key] for key in ("serviceAccount", "network", "pscInterfaceConfig") if key in run}
    output = {"outputUriPrefix": plan["output"]}
    timeout = {"timeout": f"{timeout_s:.0f}s"}
    return {"workerPoolSpecs": [pool], "scheduling": timeout, "baseOutputDirectory": output, **kept}
