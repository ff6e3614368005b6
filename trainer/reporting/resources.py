"""Memory and GPU use of this process and machine."""

import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_GIB = 2**30
_QUERY_EVERY_SECONDS = 10.0  # nvidia-smi takes a while, and reports may come fast


def memory_gib() -> float:
    """Resident memory of this process now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / _GIB
    except OSError:
        return peak_memory_gib()


def peak_memory_gib() -> float:
    """The most resident memory that this process had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / _GIB if sys.platform == "darwin" else most * 1024 / _GIB


class Gpus:
    """Memory and utilisation of the machine's NVIDIA GPUs; an empty list where NVIDIA's tools are not there."""

    def __init__(self) -> None:
        self._tool = shutil.which("nvidia-smi")
        self._asked = -_QUERY_EVERY_SECONDS
        self._answer: list[dict[str, float]] = []

    def read(self) -> list[dict[str, float]]:
        """One {"memory_gib", "utilization_percent"} a GPU, at most 10 seconds old."""
        if self._tool and time.monotonic() - self._asked >= _QUERY_EVERY_SECONDS:
            self._asked = time.monotonic()
            self._answer = parse_nvidia_smi(_ask(self._tool))
        return self._answer


def _ask(tool: str) -> str:
    command = [tool, "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=3, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_nvidia_smi(text: str) -> list[dict[str, float]]:
    """`1024, 87` (MiB, percent) lines -> one object each; `[N/A]` is 0."""
    gpus: list[dict[str, float]] = []
    for line in text.splitlines():
        fields: list[Any] = [field.strip() for field in line.split(",")]
        if len(fields) == 2:
            memory, used = (float(field) if field.replace(".", "").isdigit() else 0.0 for field in fields)
            gpus.append({"memory_gib": memory / 1024, "utilization_percent": used})
    return gpus
