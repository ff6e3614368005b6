"""Tries a compiled step on several GPUs before a run takes them, in a process of its own.

A sum over GPUs that hangs cannot be ended within the process that waits for it.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.strategy import local_devices, make_replicas
from trainer.run.child import last_error, start
from trainer.run.training_setup import build_setup
from trainer.training.xla_choice import barrier, failure_of

LONGEST_SECONDS = 900.0


def why_plain(config: TrainConfig, arguments: Sequence[str], cluster: Cluster) -> str:
    """Returns why compiled steps failed that were asked for on several GPUs, "" if they did not, or nobody asked.

    It must be called before this process takes the GPUs' memory. arguments: the flags of the run.
    """
    devices = local_devices(config, cluster)
    several_gpus = len(devices) > 1 and devices[0].startswith("GPU")
    if config.jit_compile != "true" or not several_gpus or barrier(config, devices, cluster):
        return ""
    minutes = LONGEST_SECONDS / 60
    log.info(f"jit_compile=true: tries a step on {len(devices)} GPUs in a process of its own, {minutes:g} min at most")
    return failure_of_trial(arguments, LONGEST_SECONDS)


def failure_of_trial(arguments: Sequence[str], seconds: float) -> str:
    """Runs `trainer.check --xla` with the flags of a run, and ends it after `seconds`; returns why it failed, or ""."""
    with TemporaryDirectory(prefix="trainer-xla-") as folder:
        output = Path(folder) / "log"
        child = start(["trainer.check", *arguments, "--xla"], output, on_gpus=True)
        try:
            return f"tried in a process of its own: {last_error(output)}" if child.wait(seconds) else ""
        except subprocess.TimeoutExpired:
            return f"a compiled step, tried in a process of its own, did not end within {seconds:g} s"
        finally:
            child.kill()
            child.wait()


def failure_of_compiled_step(config: TrainConfig) -> str:
    """Runs a compiled step on the devices of the settings; returns why that failed, "" if it did not."""
    setup = build_setup(config, make_replicas(config))
    with setup.dataset.reading():
        try:
            setup.step_runner(compiled=True)(setup.rows_from(0), 0, 1)
        except Exception as error:
            return failure_of(error)
    return ""
