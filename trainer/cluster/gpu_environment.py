"""Sets the variables that TensorFlow and CUDA read when they start on GPUs. Imports no TensorFlow."""

import os
import shutil
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from trainer.base.log import log

_NAMES = ("TF_GPU_THREAD_MODE", "TF_GPU_THREAD_COUNT", "CUDA_CACHE_PATH", "CUDA_CACHE_MAXSIZE", "CUDA_CACHE_DISABLE")
_LARGEST_CACHE = 4 * 2**30  # bytes: the most that CUDA allows


def set_gpu_environment(cuda_cache: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what is not set yet, on a machine with an NVIDIA driver, and logs what then holds.

    TF_GPU_THREAD_MODE=gpu_private gives each GPU its own threads that start kernels, so that reading data does not
    delay them; `global` is TensorFlow's own default. The wheel of TensorFlow has no machine code for H100 or later:
    CUDA compiles each kernel at its first use, and keeps the result in CUDA_CACHE_PATH, here the folder `cuda_cache`;
    CUDA_CACHE_DISABLE=1 switches that off. https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    if not has_nvidia_driver():
        return
    environment.setdefault("TF_GPU_THREAD_MODE", "gpu_private")
    if environment.get("CUDA_CACHE_DISABLE", "0") == "0":
        with suppress(OSError):  # without a folder that can be written, CUDA's own default stays
            if "CUDA_CACHE_PATH" not in environment:
                cuda_cache.mkdir(parents=True, exist_ok=True)
                environment["CUDA_CACHE_PATH"] = str(cuda_cache)
        environment.setdefault("CUDA_CACHE_MAXSIZE", str(_LARGEST_CACHE))
    shown = ", ".join(f"{name}={value}" for name, value in gpu_environment(environment).items())
    log.info(f"GPU settings: {shown} (a variable that you set stays as it is)")


def gpu_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables among these that are set."""
    return {name: environment[name] for name in _NAMES if name in environment}


def has_nvidia_driver() -> bool:
    """Returns whether this machine, or its container, has an NVIDIA driver; hidden GPUs count."""
    return bool(shutil.which("nvidia-smi")) or Path("/dev/nvidiactl").exists()
