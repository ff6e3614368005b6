"""Says what GPUs and processor this machine has, and in which 16 bits they compute fast."""

from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer.invariance.internals import uses_onednn

CPU_INFO = Path("/proc/cpuinfo")


def gpu_details() -> list[dict[str, Any]]:
    """Returns what TensorFlow knows of each visible GPU: device_name, compute_capability."""
    gpus = tf.config.get_visible_devices("GPU")
    return [*map(tf.config.experimental.get_device_details, gpus)]


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
