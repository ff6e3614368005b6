"""Asks nvidia-smi about the first GPU of this machine."""

import shutil
import subprocess


def used_gib() -> float | None:
    """Returns the memory of the first GPU that is used, by whomever; None if that is not known."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    used = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    return float(used) / 1024 if used.isdecimal() else None  # under MIG it is [N/A]


def described() -> list[str]:
    """Returns the name, memory and driver of each GPU; [] without an NVIDIA driver."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.splitlines()
