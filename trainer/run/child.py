"""Starts one of this package's commands as a child process. Imports no TensorFlow."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

_OF_THE_JOB = ("TF_CONFIG", "CLUSTER_SPEC", "AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR")


def start(
    words: Sequence[str], log_file: Path, more: Mapping[str, str] = MappingProxyType({}), *, on_gpus: bool = False
) -> subprocess.Popen[bytes]:
    """Starts `python -m WORDS` without the cluster and the folders of this job, and unless `on_gpus` without GPUs.

    more: what its environment has besides.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_THE_JOB}
    environment = {**inherited, **({} if on_gpus else {"CUDA_VISIBLE_DEVICES": "-1"}), **more}
    with log_file.open("wb") as output:
        return subprocess.Popen([sys.executable, "-m", *words], stdin=subprocess.DEVNULL, stdout=output,
                                stderr=subprocess.STDOUT, env=environment)  # fmt: skip


def last_error(log_file: Path) -> str:
    """Returns the last error in the output of one of our commands, or else its last line."""
    lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1]
