"""Says what workers must have in common beside the flags, Keras's settings and switches, and in what they differ.

Their processors may differ.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import keras

from trainer.base.errors import UserError, printable, shortened

_SWITCHES = re.compile(r"(TF|XLA|CUDNN|CUBLAS|NVIDIA_TF32|ONEDNN|DNNL|MKL|KERAS)_?\w*")
# What is different on each machine by right, or changes no number.
_NO_NUMBERS = re.compile(
    r"TF_CONFIG|TF_CPP_\w+|TF_NUM_\w+|TF_GPU_\w+|TF_FORCE_GPU_\w+|TF_GRPC_\w+|\w+_THREADS|KERAS_HOME|XLA_PYTHON_CLIENT_\w+|"
    r"\w*(DUMP|LOG|VERBOSE|CACHE|DIR|PATH)\w*"
)


def arithmetic(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns settings that can change numbers, by name."""
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
    }


def differing(chief: Mapping[str, Any], worker: Mapping[str, Any]) -> str:
    """Returns the names and values that differ, at most three; empty if all are equal."""
    names = [name for name in {**chief, **worker} if chief.get(name) != worker.get(name)]
    return "; ".join(
        f"{name}: {shortened(repr(chief.get(name)))} on the chief, {shortened(repr(worker.get(name)))} on the worker"
        for name in names[:3]
    )


def unlike(worker: str, action: str, names: str) -> UserError:
    """Returns the error for a worker that does not `action` as the chief; names: what differs."""
    return UserError(
        printable(
            f"{worker} and the chief do not {action} ({names}): start every worker by the same command, with the same "
            "files and versions"
        )
    )
