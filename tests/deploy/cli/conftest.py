"""Runs what a job's spec says, in an environment that has nothing of ours."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from deploy.platform.local import free_addresses
from tests.deploy.conftest import FlyingClock, Job, variables_of
from tests.deploy.emulator import PARENT, Emulator
from tests.deploy.platform.test_backends import SPEC


def runs_spec(google: Emulator, job: Job, python: Path, folder: Path) -> None:
    """Runs the workers of a job by the commands of its spec, in an environment that has nothing of
    ours."""
    google.begin(job)
    spec = job["jobSpec"]
    output = spec["baseOutputDirectory"]["outputUriPrefix"]
    pools = {f"workerpool{place}": pool for place, pool in enumerate(spec["workerPoolSpecs"])}
    ports = iter(free_addresses(sum(int(pool["replicaCount"]) for pool in pools.values())))
    cluster = {
        name: [next(ports) for _ in range(int(pool["replicaCount"]))]
        for name, pool in pools.items()
    }
    workers = []
    for name, pool in pools.items():
        task = pool["containerSpec"]
        for index in range(len(cluster[name])):
            place = {"cluster": cluster, "task": {"type": name, "index": index}}
            given = {
                "PATH": os.environ["PATH"],
                "AIP_MODEL_DIR": f"{output}/model/",
                "CLUSTER_SPEC": json.dumps(place),
                "STORAGE_EMULATOR_HOST": os.environ["STORAGE_EMULATOR_HOST"],
                "SECRET_MANAGER_HOST": google.url,
                "GCE_METADATA_HOST": google.url.removeprefix("http://"),
                "TMPDIR": str(folder),
            }
            given |= variables_of(task)
            command = [str(python), *task["command"][1:], *task.get("args", [])]
            workers.append(
                (
                    f"{name}-{index}",
                    subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True),
                )
            )
    failed = ""
    for name, process in workers:
        said, _ = process.communicate(timeout=120)
        for line in said.splitlines():
            google.log(job, line, name)
        if process.returncode:
            failed = f"The replica {name} exited with a non-zero status of {process.returncode}."
    google.end(job, "FAILED" if failed else "SUCCEEDED", failed)


@pytest.fixture
def job(cloud: Emulator) -> Job:
    """Returns a job with a price that waits for its machines."""
    return made(cloud, **{"submission": "s1", "usd-per-hour": "3-6000"})


def made(cloud: Emulator, **labels: str) -> Job:
    return cloud.create(PARENT, {"displayName": "demo", "jobSpec": SPEC, "labels": labels})


@pytest.fixture
def vertex(cloud: Emulator, flying: FlyingClock, bare: Path, tmp_path: Path) -> Emulator:
    """Returns the emulator, which runs what a job's spec says, and a clock on which that takes no
    time."""
    # the SDK's, and gcloud's
    cloud.accounts = {"": "me@my-proj.test", "not-a-secret": "me@my-proj.test"}
    cloud.run = lambda google, job: runs_spec(google, job, bare, tmp_path)
    flying.asleep = lambda: [thread.join() for thread in list(cloud.threads)]
    return cloud
