"""Measures memory and GPU use of this process and machine."""

import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_GIB = 2**30
_QUERY_EVERY_SECONDS = 10.0  # nvidia-smi is slow, and reports may be frequent


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


class Gpus:
    """Reads memory and utilisation of the machine's NVIDIA GPUs, if nvidia-smi is installed."""

    def __init__(self) -> None:
        self._tool = shutil.which("nvidia-smi")
        self._queried = -_QUERY_EVERY_SECONDS
        self._gpus: list[dict[str, float]] = []

    def read(self) -> list[dict[str, float]]:
        """Returns {"memory_gib", "utilization_percent"} for each GPU, at most 10 seconds old."""
        if self._tool and time.monotonic() - self._queried >= _QUERY_EVERY_SECONDS:
            self._queried = time.monotonic()
            self._gpus = parse_nvidia_smi(_query(self._tool))
        return self._gpus


def _query(tool: str) -> str:
    command = [tool, "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=3, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_nvidia_smi(text: str) -> list[dict[str, float]]:
    """Parses lines such as `1024, 87` (MiB, percent) into one object each; `[N/A]` becomes 0."""
    gpus: list[dict[str, float]] = []
    for line in text.splitlines():
        fields: list[Any] = [field.strip() for field in line.split(",")]
        if len(fields) == 2:
            memory, used = (float(field) if field.replace(".", "").isdigit() else 0.0 for field in fields)
            gpus.append({"memory_gib": memory / 1024, "utilization_percent": used})
    return gpus
