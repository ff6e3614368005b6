"""Measures memory and GPU use of this process and machine."""

import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tensorflow as tf

_GIB = 2**30
_QUERY_EVERY_SECONDS = 10.0
_LONGEST_QUERY_SECONDS = 30.0  # a driver that has to start first takes seconds


def memory_gib() -> float:
    """Returns the resident memory of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / _GIB
    except OSError:
        return peak_memory_gib()


def peak_memory_gib() -> float:
    """Returns the largest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _GIB if sys.platform == "darwin" else peak * 1024 / _GIB


def peak_device_memory_gib(devices: Sequence[str]) -> list[float]:
    """Returns the most memory that TensorFlow has held on each of the devices so far; [] if it does not count it.

    Weights, activations and workspaces of kernels count; the CUDA context and libraries take some 0.5 GiB besides.
    """
    try:
        peaks = [tf.config.experimental.get_memory_info(device)["peak"] for device in devices]
    except ValueError:  # this device's allocator keeps no statistics
        return []
    return [round(peak / _GIB, 4) for peak in peaks]


class Gpus:
    """Reads memory and utilisation of this worker's first `count` NVIDIA GPUs, if nvidia-smi is installed.

    nvidia-smi takes up to seconds, so a thread runs it every 10 seconds and training never waits for it.
    """

    def __init__(self, count: int) -> None:
        self._count, self._gpus = count, list[dict[str, float | None]]()
        self._closed = threading.Event()
        tool = shutil.which("nvidia-smi")
        if tool and count:
            threading.Thread(target=self._watch, args=(tool,), name="nvidia-smi", daemon=True).start()

    def read(self) -> list[dict[str, float | None]]:
        """Returns the newest {"memory_gib", "utilization_percent"} of each GPU, without waiting; [] until known."""
        return self._gpus

    def close(self) -> None:
        """Ends the queries."""
        self._closed.set()

    def _watch(self, tool: str) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # nvidia-smi itself ignores it
        ours = [f"--id={visible}"] if visible else []
        command = [tool, *ours, "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
        limits: dict[str, Any] = {"timeout": _LONGEST_QUERY_SECONDS, "check": True}
        while not self._closed.is_set():
            text = ""
            with suppress(OSError, subprocess.SubprocessError):
                text = subprocess.run(command, capture_output=True, text=True, **limits).stdout
            self._gpus = parse_nvidia_smi(text)[: self._count]
            self._closed.wait(_QUERY_EVERY_SECONDS)


def parse_nvidia_smi(text: str) -> list[dict[str, float | None]]:
    """Parses lines such as `1024, 87` (MiB, percent) into one object each; `[N/A]`, as under MIG, becomes None."""
    gpus: list[dict[str, float | None]] = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 2:
            memory, used = (float(field) if field.replace(".", "").isdigit() else None for field in fields)
            gpus.append({"memory_gib": None if memory is None else memory / 1024, "utilization_percent": used})
    return gpus
