"""Holds the peak rates of GPUs at the precision of a run, and how much scratch memory their kernels
get.

Imports no TensorFlow, because plans need these numbers before there is a run.
deploy/tiers/machines.yaml has the other facts about Vertex AI's GPUs.
"""

import re
from collections.abc import Iterable, Mapping

from trainer.base.settings.train_config import TrainConfig

# NVIDIA's data sheets: dense TFLOP/s of matrix products (those with sparsity are halved), by
# arithmetic and by Vertex AI's name of the card. Cards before A100 have no TF32 and no bfloat16.
TFLOPS: Mapping[str, Mapping[str, float]] = {
    "NVIDIA_TESLA_P4": {"float32": 5.5},
    "NVIDIA_TESLA_P100": {"float32": 9.3, "16_bit": 18.7},
    "NVIDIA_TESLA_V100": {"float32": 15.7, "16_bit": 125},
    "NVIDIA_TESLA_T4": {"float32": 8.1, "16_bit": 65},
    "NVIDIA_L4": {"float32": 30.3, "tf32": 60, "16_bit": 121},
    "NVIDIA_TESLA_A100": {"float32": 19.5, "tf32": 156, "16_bit": 312},
    "NVIDIA_A100_80GB": {"float32": 19.5, "tf32": 156, "16_bit": 312},
    "NVIDIA_H100_80GB": {"float32": 67, "tf32": 494, "16_bit": 989},
    "NVIDIA_H100_MEGA_80GB": {"float32": 67, "tf32": 494, "16_bit": 989},
    "NVIDIA_H200_141GB": {"float32": 67, "tf32": 494, "16_bit": 989},
}
_OPTIONAL_WORDS = {"NVIDIA", "TESLA", "141GB"}  # words of a name that the driver's name may lack


def accelerator_of(gpu: str, names: Iterable[str] = TFLOPS) -> str:
    """Returns Vertex AI's name for a GPU, from the name that its driver gives, as "NVIDIA
    A100-SXM4-80GB".

    names: the names to choose from. Returns `gpu` itself if none of them fits.
    """
    words = set(re.split(r"\W+", gpu.upper()))
    parts = {name: set(name.split("_")) - _OPTIONAL_WORDS for name in names}
    return max(
        (name for name in parts if parts[name] <= words),
        key=lambda name: len(parts[name]),
        default=gpu,
    )


def arithmetic(config: TrainConfig, tflops: Mapping[str, float]) -> str:
    """Returns the arithmetic of matrix products in a run: "16_bit", "tf32" or "float32"; "" for
    float64.

    tflops: the rates of the GPU by arithmetic, as in TFLOPS.
    """
    if config.precision == "float64":
        return ""
    if config.precision == "mixed_bfloat16" and "tf32" not in tflops:
        return "float32"
    if config.precision.startswith("mixed"):
        return "16_bit" if "16_bit" in tflops else "float32"
    return "tf32" if config.tf32 and "tf32" in tflops else "float32"


def peak_tflops(gpu: str, config: TrainConfig) -> float:
    """Returns the data-sheet TFLOP/s of a GPU at the run's precision; 0 if unknown, or for a part
    of a GPU (MIG).

    gpu: the name that its driver gives.
    """
    tflops = {} if "MIG" in gpu.split() else TFLOPS.get(accelerator_of(gpu), {})
    return tflops.get(arithmetic(config, tflops), 0.0)


def scratch_mib(memory_gib: float) -> int:
    """Returns the limit in MiB of cuDNN's workspace for a convolution, by a GPU's memory; 0:
    TensorFlow's default.

    The default, 4 or 8 GiB, would be a quarter or half of a small GPU's memory.
    """
    return 0 if memory_gib >= 32 else 1024 if memory_gib >= 12 else 512


def data_fit_on_gpu(data_bytes: float, memory_bytes: float) -> bool:
    """Returns whether data stay in a GPU's memory for the whole run: if they take at most a quarter
    of it."""
    return 4 * data_bytes <= memory_bytes
