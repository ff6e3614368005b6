"""Describes a run for run.json: settings, batch, devices, data, versions."""

import dataclasses
import os
import platform
import shlex
import time
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

import trainer
from trainer.base.run_files.records import RunInfo, trainer_commit
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import gpu_environment
from trainer.cluster.strategy import Replicas, simulated_devices
from trainer.data.batches import Schedule

COMMAND = "TRAINER_COMMAND"  # set by `python -m deploy local` to the command that the user typed


def run_info(
    config: TrainConfig, command: Sequence[str], replicas: Replicas, schedule: Schedule, total_steps: int
) -> RunInfo:
    """Returns the content of run.json."""
    return {
        "config": dataclasses.asdict(config),
        "batch": replicas.sentence(),
        "cluster": {
            "workers": replicas.cluster.workers,
            "addresses": list(replicas.cluster.addresses),
            "replicas": replicas.count,
            "rows_per_replica": replicas.rows,
        },
        "devices": list(replicas.devices),  # of each worker
        "gpus": gpu_names()[: replicas.local],  # of this worker
        "gpu_environment": gpu_environment(),
        "on_vertex": os.environ.get("CLOUD_ML_JOB_ID", "").isdigit(),  # `deploy local` calls its jobs local-…
        "simulated": simulated_devices() > 0,  # logical CPU devices stand for accelerators
        "strategy": "MultiWorkerMirroredStrategy" if replicas.cluster.several else type(replicas.strategy).__name__,
        "collectives": replicas.collectives,
        "data": {
            "examples": schedule.examples,
            "examples_per_step": schedule.examples_per_step,
            "steps_per_epoch": schedule.steps_per_epoch,
        },
        "total_steps": total_steps,
        "versions": versions(),
        "git_commit": trainer_commit(),
        "command": os.environ.get(COMMAND) or shlex.join(command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def versions() -> dict[str, str]:
    """Returns the versions of this package, of Python and of the libraries that the numbers depend on."""
    return {
        "trainer": trainer.__version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
    }


def gpu_names() -> list[str]:
    """Returns models of the visible GPUs, as "NVIDIA A100-SXM4-80GB"; "" if TensorFlow does not report one."""
    details = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    return [str(detail.get("device_name", "")) for detail in details]
