"""Reads TF_CONFIG, as Vertex AI sets it, into a Cluster, and sets up this process for TensorFlow.

Both happen before TensorFlow is imported. A Cluster that `read_cluster` returns has valid, distinct
addresses.

https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/distributed-training
"""

import ctypes
import json
import math
import os
import platform
import re
import shutil
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.limit_watch import ask_gpus
from trainer.base.log import log
from trainer.base.settings.accelerators import scratch_mib
from trainer.base.storage.local_files import MOUNT
from trainer.base.storage.staging import cache_home

_SCRATCH = "TF_CUDNN_WORKSPACE_LIMIT_IN_MB"
_GPU_VARIABLES = (
    "TF_GPU_THREAD_MODE",
    "TF_GPU_THREAD_COUNT",
    _SCRATCH,
    "CUDA_CACHE_PATH",
    "CUDA_CACHE_MAXSIZE",
    "CUDA_CACHE_DISABLE",
)
_LARGEST_CACHE = 4 * 2**30  # bytes: the most that CUDA allows
# Options of glibc's malloc.h and the values that keep freed memory, by the variables that set them.
_KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": (-8, 1),  # a thread's own arena maps what is large
    "MALLOC_MMAP_MAX_": (-4, 0),
    "MALLOC_TRIM_THRESHOLD_": (-1, -1),  # at most 2**64 - 1 bytes
}
_ADDRESS = re.compile(r"[^\s/:@]+:[0-9]{1,5}|\[[0-9a-fA-F:.]+\]:[0-9]{1,5}")


@dataclass(frozen=True)
class Cluster:
    """Lists the workers of a job, the chief first, and the index of this process among them."""

    addresses: tuple[str, ...] = ()  # host:port of each worker; empty for one machine
    index: int = 0

    @property
    def workers(self) -> int:
        """Returns the number of processes of the job: 1 without a cluster."""
        return max(1, len(self.addresses))

    @property
    def several(self) -> bool:
        """Returns whether there is more than one worker."""
        return self.workers > 1

    @property
    def is_chief(self) -> bool:
        """Returns whether this worker writes checkpoints and results.

        A single worker is the chief.
        """
        return self.index == 0

    def writes(self, path: str | os.PathLike[str]) -> bool:
        """Returns whether this worker writes what each worker's code writes at `path`.

        In a bucket, or on the machine of the chief, the chief alone does. Another machine has a
        disk of its own.
        """
        shared = str(path).startswith(("gs://", MOUNT))
        hosts = [address.rpartition(":")[0] for address in self.addresses]
        return self.is_chief or not (shared or hosts[self.index] == hosts[0])

    def name(self, index: int) -> str:
        """Returns the name of a worker in messages, such as `worker 1 (host:2222)`.

        Worker 0 is the chief.
        """
        return f"{'chief' if index == 0 else f'worker {index}'} ({self.addresses[index]})"


def read_cluster(environment: Mapping[str, str] = os.environ) -> Cluster:
    """Returns the cluster that TF_CONFIG describes; one machine if there is none, or only a chief.

    Raises UserError if it is malformed.
    """
    # The addresses of both roles must be lists of host:port.
    try:
        content = _object(json.loads(environment.get("TF_CONFIG") or "{}"), "the variable")
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"TF_CONFIG: not valid JSON ({error}): fix it, or unset TF_CONFIG for one machine"
        ) from None
    stated = _object(content.get("cluster", {}), "cluster")
    tasks = {role: stated.get(role) or [] for role in ("chief", "worker")}
    for role, of_role in tasks.items():
        if not isinstance(of_role, list) or not all(
            isinstance(item, str)
            and _ADDRESS.fullmatch(item)
            and 0 < int(item.rpartition(":")[2]) < 65536
            for item in of_role
        ):
            raise UserError(
                f"TF_CONFIG: cluster.{role} must be a list of host:port addresses, not"
                f" {str(of_role)[:60]!r}"
            )

    # There may be no tasks of other roles, and no address twice.
    addresses = (*tasks["chief"], *tasks["worker"])
    task = _object(content.get("task"), "task") if addresses else {"type": "chief"}
    roles = [*(role for role, of_role in stated.items() if of_role), str(task.get("type"))]
    if others := [role for role in roles if role not in tasks]:
        raise UserError(
            f"TF_CONFIG: this trainer has no tasks of role {others[0][:60]!r}: supported are the"
            " chief (pool 0) and workers (pool 1)"
        )
    if not addresses:
        return Cluster()
    if repeated := [address for address in addresses if addresses.count(address) > 1]:
        raise UserError(
            f"TF_CONFIG: the address {repeated[0]} appears more than once: every task needs a"
            " separate address"
        )

    # The task of this process is one of these.
    role = str(task.get("type"))
    index = task.get("index", 0)
    count = len(tasks[role])
    if type(index) is not int or not 0 <= index < count:
        raise UserError(
            f"TF_CONFIG: task.index is {str(index)[:20]}, but the cluster has {count} of {role},"
            " numbered from 0"
        )
    first = 0 if role == "chief" else len(tasks["chief"])
    return Cluster(addresses if len(addresses) > 1 else (), first + index)


def _object(value: Any, part: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"TF_CONFIG: {part} must be a JSON object, not {str(value)[:60]!r}")
    return value


def set_up_process(cache_dir: str) -> None:
    """Sets what TensorFlow needs on a machine with an NVIDIA driver, or what makes the steps of a
    CPU faster."""
    if shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists():
        set_gpu_environment(cache_dir)
    else:
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory for the next step; a variable that you set stays as it is.

    By default glibc maps each array of over 32 MiB anew and unmaps it, so that every step waits for
    the kernel to clear its pages again. Other C libraries are left alone.
    https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for name, (option, value) in _KEEP_MEMORY.items():
        if name not in os.environ:
            mallopt(option, value)


def set_gpu_environment(cache_dir: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets and logs variables for GPUs.

    A variable that is set already stays. TF_GPU_THREAD_MODE=gpu_private gives each GPU its own
    threads that start kernels, so that reading data does not delay them; `global` is TensorFlow's
    own default. The wheel of TensorFlow has no machine code for H100 or later: CUDA compiles each
    kernel at its first use, and keeps the result in CUDA_CACHE_PATH, here a folder in `cache_dir`;
    CUDA_CACHE_DISABLE=1 switches that off. TF_CUDNN_WORKSPACE_LIMIT_IN_MB limits the scratch memory
    of a convolution, with and without XLA; plans count on this limit.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    environment.setdefault("TF_GPU_THREAD_MODE", "gpu_private")
    gibs = [mib / 1024 for (mib,) in ask_gpus("memory.total") if mib]
    if limit := scratch_mib(min(gibs, default=math.inf)):
        environment.setdefault(_SCRATCH, str(limit))
    if environment.get("CUDA_CACHE_DISABLE", "0") == "0":
        with suppress(OSError):  # without a folder that can be written, CUDA's own default stays
            if "CUDA_CACHE_PATH" not in environment:
                cuda_cache = cache_home(cache_dir) / "cuda"
                cuda_cache.mkdir(parents=True, exist_ok=True)
                environment["CUDA_CACHE_PATH"] = str(cuda_cache)
        environment.setdefault("CUDA_CACHE_MAXSIZE", str(_LARGEST_CACHE))
    text = ", ".join(map("=".join, gpu_environment(environment).items()))
    log.info(f"GPU settings: {text} (a variable that you set stays as it is)")


def gpu_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the values of the variables of `set_gpu_environment` that are set, by name."""
    return {name: environment[name] for name in _GPU_VARIABLES if name in environment}
