"""Measures the memory of this process, and the memory and the use of its GPUs."""

import resource
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from trainer.base.limit_watch import read_gpus

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
