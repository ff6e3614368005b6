"""Which devices a run uses, and the tf.distribute strategy over them."""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer.config import TrainConfig
from trainer.errors import UserError


@dataclass(frozen=True)
class Replicas:
    """The devices of this run and the strategy that joins them."""

    strategy: Any
    devices: tuple[str, ...]
    rows: int  # of each global batch, on one replica
    global_batch_size: int

    @property
    def count(self) -> int:
        return len(self.devices)

    def sentence(self) -> str:
        """The batch, said once in one way everywhere: `global batch 128 = 2 replicas x 64`."""
        noun = "replica" if self.count == 1 else "replicas"
        return f"global batch {self.global_batch_size} = {self.count} {noun} x {self.rows}"


def make_replicas(config: TrainConfig) -> Replicas:
    """The strategy for what is visible and asked for; UserError where the machine or the batch does not fit."""
    gpus = tf.config.list_physical_devices("GPU")
    _check_expected(config.expect_devices, gpus)
    devices = _gpus(config.replicas, gpus) if gpus else _cpus(config.replicas or 1)
    if config.strategy == "one_device":
        devices = devices[:1]
    rows = config.rows_per_replica(len(devices))
    if len(devices) > 1 or config.strategy == "mirrored":
        strategy = tf.distribute.MirroredStrategy(list(devices))
    else:
        strategy = tf.distribute.get_strategy()
    return Replicas(strategy, devices, rows, config.global_batch_size)


def _check_expected(expected: int, gpus: list[Any]) -> None:
    if len(gpus) >= expected:
        return
    found = f"{len(gpus)} visible" if gpus else "none is visible"
    raise UserError(
        f"expect_devices={expected}, but of accelerators {found}: check the machine's GPU count, its drivers and "
        "whether this TensorFlow is a GPU build (TF_CPP_MIN_LOG_LEVEL=0 shows why), or lower --expect_devices"
    )


def _gpus(wanted: int, gpus: list[Any]) -> tuple[str, ...]:
    if wanted > len(gpus):
        raise UserError(f"replicas={wanted}, but {len(gpus)} GPUs are visible: lower --replicas, or 0 for all of them")
    for gpu in gpus:
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:  # TensorFlow runs already and cannot change it any more
            break
    return tuple(f"GPU:{index}" for index in range(wanted or len(gpus)))


def _cpus(wanted: int) -> tuple[str, ...]:
    """The first `wanted` logical CPU devices, made where TensorFlow has not started yet."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    if wanted > 1:
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * wanted)
        except RuntimeError:  # already running, with as many as it was started with
            made = len(tf.config.list_logical_devices("CPU"))
            if made < wanted:
                raise UserError(
                    f"replicas={wanted}, but TensorFlow already runs here with {made} CPU devices: start a new process"
                ) from None
    return tuple(f"CPU:{index}" for index in range(wanted))
