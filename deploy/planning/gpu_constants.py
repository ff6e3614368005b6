"""Reads what a plan takes for granted of any GPU: gpu_constants.json, which `python -m benchmarks.gpu` measures."""

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("gpu_constants.json")


@dataclass(frozen=True)
class GpuConstants:
    """Holds what it takes to start an operation or an all-reduce, and what a GPU holds beside tensors."""

    source: str  # "assumed", or "measured on GPU, DATE"
    launch_seconds: float
    all_reduce_seconds: float  # on one machine
    context_gib: float  # of CUDA
    workspace_gib: float  # of cuDNN and cuBLAS
    nccl_gib: float  # buffers, on a machine with several GPUs


def read_constants(path: Path = FILE) -> GpuConstants:
    """Returns the constants in a file. Raises TypeError for missing or unknown names."""
    return GpuConstants(**json.loads(path.read_text(encoding="utf-8")))


CONSTANTS = read_constants()
