"""Builds the environment of local workers as Vertex AI builds it: variables, devices and cores.

https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/distributed-training
has TF_CONFIG and CLUSTER_SPEC,
https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/code-requirements (AIP_ …).
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.tiers.tier import Tier
from trainer.base.errors import UserError
from trainer.base.run_files.records import CHECKPOINTS, LOGS, MODEL


@dataclass(frozen=True)
class LocalWorker:
    """Describes one process of a local job."""

    name: str  # as in Vertex AI's logs: workerpool0-0
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]  # in addition to that of this process
    cores: frozenset[int]


def local_workers(
    tier: Tier, arguments: Sequence[str], job_dir: Path, job_id: str, command: str = "",
    program: tuple[str, Mapping[str, str]] = ("", {}),
) -> list[LocalWorker]:  # fmt: skip
    """Returns the workers of `tier`, chief first.

    `arguments`, `program`: as a `JobRequest` has them. `command`: what the user typed, for run.json; empty: the chief's
    own command is recorded.
    """
    names = [f"workerpool{place}-{index}" for place, pool in enumerate(tier.spec["workerPoolSpecs"])
             for index in range(int(pool.get("replicaCount", 1)))]  # fmt: skip
    devices, cores = _devices(tier.accelerators, len(names)), _cores(len(names))
    addresses, (module, variables) = free_addresses(len(names)), program
    shared = {
        "CLOUD_ML_JOB_ID": job_id,
        "CLOUD_ML_PROJECT_ID": "0",
        "AIP_MODEL_DIR": f"{job_dir}/{MODEL}/",
        "AIP_CHECKPOINT_DIR": f"{job_dir}/{CHECKPOINTS}/",
        "AIP_TENSORBOARD_LOG_DIR": f"{job_dir}/{LOGS}/",
        "PYTHONUNBUFFERED": "1",
        "TRAINER_COMMAND": command,
        **variables,
    }
    result = []
    for index, name in enumerate(names):
        pool = tier.spec["workerPoolSpecs"][int(name[10])]
        task = pool.get("pythonPackageSpec") or pool["containerSpec"]
        of_tier = {variable["name"]: variable.get("value", "") for variable in task.get("env", [])}
        threads = dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"), str(len(cores[index])))
        environment = {**of_tier, **shared, **threads, **devices[index], **_cluster(names, addresses, name, job_id)}
        words = (*task.get("args", []), *arguments)
        # An image's own entry point is taken for the trainer.
        of_image = task.get("command", [])[2:] if task.get("command", [])[1:2] == ["-m"] else []
        runs = module or task.get("pythonModule") or "".join(of_image) or "trainer.task"
        result.append(LocalWorker(name, runs, words, environment, cores[index]))
    return result


def _cluster(names: Sequence[str], addresses: Sequence[str], name: str, job_id: str) -> dict[str, str]:
    """Returns TF_CONFIG and CLUSTER_SPEC of the worker `name`; Vertex AI sets them for a single worker, too."""
    by_pool: dict[str, list[str]] = {}
    for worker, address in zip(names, addresses, strict=True):
        by_pool.setdefault(worker.split("-")[0], []).append(address)
    roles = {"workerpool0": "chief", "workerpool1": "worker"}
    pool, index = name.split("-")
    config = {
        "cluster": {roles[pool]: members for pool, members in by_pool.items()},
        "environment": "cloud",
        "task": {"type": roles[pool], "index": int(index), "cloud": job_id},
    }
    spec = {"cluster": by_pool, "environment": "cloud", "task": {"type": pool, "index": int(index)}}
    return {"TF_CONFIG": json.dumps(config), "CLUSTER_SPEC": json.dumps(spec)}


def free_addresses(count: int) -> list[str]:
    """Returns `count` local addresses whose ports are free now.

    The ports are below the range of outgoing connections, which could take one before it is used.
    """
    addresses: list[str] = []
    while len(addresses) < count:
        port = 10_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            addresses += [f"127.0.0.1:{port}"] if f"127.0.0.1:{port}" not in addresses else []
    return addresses


def _devices(accelerators: int, workers: int) -> list[dict[str, str]]:
    """Splits the GPUs that this process may use between the workers; logical CPU devices simulate missing ones."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        query = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        visible = ",".join(query.stdout.split()) if query.returncode == 0 else ""
    gpus = [number for number in (visible or "").split(",") if number and number != "-1"]
    if not gpus or not accelerators:
        return [{"CUDA_VISIBLE_DEVICES": "", "TRAINER_SIMULATED_DEVICES": str(accelerators)}] * workers
    if len(gpus) < accelerators * workers:
        raise UserError(
            f"the tier has {workers} x {accelerators} accelerators, this machine {len(gpus)} GPUs: use a smaller "
            "tier, or hide them to simulate all (CUDA_VISIBLE_DEVICES=)"
        )
    shares = [gpus[first : first + accelerators] for first in range(0, workers * accelerators, accelerators)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def _cores(workers: int) -> list[frozenset[int]]:
    """Splits the cores of this process between the workers, who share them if there are fewer than workers."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if len(cores) < workers:
        return [frozenset({cores[index % len(cores)]}) for index in range(workers)]
    share = len(cores) // workers
    return [frozenset(cores[index * share : (index + 1) * share]) for index in range(workers)]
