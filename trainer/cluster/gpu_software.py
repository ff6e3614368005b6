"""States which TensorFlow, CUDA and NVIDIA driver this machine has, for the error about missing GPUs."""

import ctypes
import os
import re
from pathlib import Path

import tensorflow as tf

_DRIVER = "libcuda.so.1"  # comes with the driver, not with CUDA
_LOADED = Path("/proc/driver/nvidia/version")


def gpu_software() -> str:
    """Returns one phrase: the build of TensorFlow, the driver, and the newest CUDA that the driver runs."""
    build = tf.sysconfig.get_build_info()
    cuda = f"built for CUDA {build.get('cuda_version', '?')}" if build.get("is_cuda_build") else "built without CUDA"
    return f"TensorFlow {tf.__version__}, {cuda}; {_driver()}"


def _driver() -> str:
    version_line = re.search(r"Kernel Module.*?\s(\d[\d.]+)", _LOADED.read_text()) if _LOADED.is_file() else None
    kernel = f"driver {version_line[1]}" if version_line else "no driver in /proc/driver/nvidia"
    try:
        library = ctypes.CDLL(_DRIVER)
    except OSError:
        folders = os.environ.get("LD_LIBRARY_PATH") or "not set"
        return f"{kernel}, and {_DRIVER} is not found (LD_LIBRARY_PATH: {folders})"
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):  # https://docs.nvidia.com/cuda/cuda-driver-api
        return f"{kernel}, and {_DRIVER} does not answer"
    return f"{kernel}, for CUDA up to {version.value // 1000}.{version.value % 1000 // 10}"
