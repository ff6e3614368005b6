"""Tells the GPUs of this machine, and measures their use and the memory of this process."""

import resource
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer.base.limit_watch import read_gpus
from trainer.invariance.internals import uses_onednn

CPU_INFO = Path("/proc/cpuinfo")
_GIB = 2**30
_QUERY_EVERY_SECONDS = 10.0


def memory_gib() -> float:
    """Returns the resident memory of this process in GiB."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / _GIB
    except OSError:
        return peak_memory_gib()


def peak_memory_gib() -> float:
    """Returns the largest resident memory of this process so far in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _GIB if sys.platform == "darwin" else peak * 1024 / _GIB


def peak_device_memory_gib(devices: Sequence[str]) -> list[float]:
    """Returns TensorFlow's peak memory so far on each device.

    It is [] for devices on which it does not count memory. It includes weights, activations and
    kernels' workspaces, but not the CUDA context and libraries (about 0.5 GiB).
    """
    try:
        peaks = [tf.config.experimental.get_memory_info(device)["peak"] for device in devices]
    except ValueError:  # this device's allocator keeps no statistics
        return []
    return [round(peak / _GIB, 4) for peak in peaks]


def gpu_details() -> list[dict[str, Any]]:
    """Returns what TensorFlow knows of each visible GPU: device_name, compute_capability."""
    return [*map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))]


def gpu_names() -> list[str]:
    """Returns the models of the visible GPUs, such as "NVIDIA A100-SXM4-80GB".

    It is "" for one that is unknown.
    """
    return [str(details.get("device_name", "")) for details in gpu_details()]


def half_precision() -> str:
    """Returns the 16-bit precision that all visible GPUs compute fast; bfloat16 without GPUs.

    Cards below compute capability 8.0 (P100, V100, T4) have no bfloat16:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
    """
    old = any(details.get("compute_capability", (8, 0)) < (8, 0) for details in gpu_details())
    return "mixed_float16" if old else "mixed_bfloat16"


def fast_precision(*, on_gpus: bool) -> str:
    """Returns the 16-bit precision that this machine multiplies faster than float32, or "".

    GPUs from compute capability 7.0 on have tensor cores, some processors AMX or avx512_bf16, which
    TensorFlow uses by oneDNN.
    """
    if on_gpus:
        capabilities = [details.get("compute_capability", (0, 0)) for details in gpu_details()]
        return half_precision() if min(capabilities, default=(0, 0)) >= (7, 0) else ""
    bfloat16 = {"amx_bf16", "avx512_bf16"} & {*cpu_info("flags").split()}
    return "mixed_bfloat16" if bfloat16 and uses_onednn() else ""


def cpu_info(name: str) -> str:
    """Returns what Linux says of the first core by a name such as "flags"; "" where it does not."""
    text = CPU_INFO.read_text("utf-8", "replace") if CPU_INFO.exists() else ""
    lines = (line for line in text.splitlines() if line.startswith(name))
    return next(lines, "").partition(": ")[2]


class Gpus:
    """Reads memory and utilization of this worker's first `count` NVIDIA GPUs.

    It reads nothing where nvidia-smi is not installed. nvidia-smi can take seconds, so a thread
    runs it every 10 seconds, and training never waits for it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        # The newest {"memory_gib", "utilization_percent"} of each GPU; [] until they are known.
        self.readings: list[dict[str, float | None]] = []
        self._closed = threading.Event()
        if count:
            threading.Thread(target=self._watch, name="nvidia-smi", daemon=True).start()

    def close(self) -> None:
        """Stops the thread."""
        self._closed.set()

    def _watch(self) -> None:
        """Reads the GPUs again and again until `close`."""
        while not self._closed.is_set():
            self.readings = read_gpus()[: self._count]
            self._closed.wait(_QUERY_EVERY_SECONDS)
