"""Describes what a worker computes with beside the flags: Keras's settings, switches of TensorFlow, the processor.

Workers compare it when they meet: settings and switches must be equal, processors may differ and are then named.
"""

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import keras

from trainer.cluster.meeting import ADVISORY

_SWITCHES = re.compile(r"(TF|XLA|CUDNN|CUBLAS|NVIDIA_TF32|ONEDNN|DNNL|MKL|KERAS)_?\w*")
# What is different on each machine by right, or changes no number.
_NO_NUMBERS = re.compile(
    r"TF_CONFIG|TF_CPP_\w+|TF_NUM_\w+|TF_GPU_\w+|TF_FORCE_GPU_\w+|TF_GRPC_\w+|\w+_THREADS|KERAS_HOME|XLA_PYTHON_CLIENT_\w+|"
    r"\w*(DUMP|LOG|VERBOSE|CACHE|DIR|PATH)\w*"
)
# Instructions for which kernels of TensorFlow, oneDNN and Eigen add in another order or precision.
_INSTRUCTIONS = re.compile(r"avx\w*|fma|amx_\w+|sve\w*|asimd\w*|bf16")


def arithmetic(environment: Mapping[str, str] = os.environ, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Returns settings that can change numbers, by name; those whose name ends in "?" may differ between workers."""
    switches = {
        name: value
        for name, value in sorted(environment.items())
        if _SWITCHES.fullmatch(name) and not _NO_NUMBERS.fullmatch(name)
    }
    return {
        "keras.json epsilon": str(keras.config.epsilon()),
        "keras.json floatx": keras.config.floatx(),
        "keras.json image_data_format": keras.config.image_data_format(),
        "keras.json backend": keras.config.backend(),
        **switches,
        f"processor{ADVISORY}": _processor(cpuinfo),
    }


def _processor(cpuinfo: Path) -> str:
    """Returns the machine's kind and the instructions of its first core that change numbers."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    instructions = sorted(flag for flag in (flags[1].split() if flags else []) if _INSTRUCTIONS.fullmatch(flag))
    return " ".join([platform.machine(), *instructions])
