"""Selects the devices of a run and builds the tf.distribute strategy over them and over all
workers.

`Replicas` tells the rest of the trainer how many replicas and rows there are, and sums values over
all workers.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.rendezvous import differing, unlike
from trainer.invariance.internals import (
    await_silent_workers,
    cpu_devices_per_worker,
    separate_collectives,
)

SIMULATED = "TRAINER_SIMULATED_DEVICES"  # set by `python -m deploy local` on a machine without GPUs

ONE_MACHINE = Cluster()

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Replicas:
    """Describes the devices of this run and the strategy over them."""

    strategy: Any
    devices: tuple[str, ...]  # of this worker
    rows: int  # of each global batch, per replica
    global_batch_size: int
    cluster: Cluster = ONE_MACHINE
    collectives: str | None = None  # how replicas all-reduce: nccl or ring; None for one replica
    micro_batches: int = 1  # into which each update splits a replica's rows
    virtual: int = 0  # fixed shards of the batch (--virtual_replicas); 0: off
    copies: int = 1  # how many replicas have the same rows: of a smaller batch, see `of_batch`
    # a function that all workers call before each sum over them, and that may raise
    before_sum: Callable[[], None] = lambda: None

    @property
    def local(self) -> int:
        """Returns the number of replicas on this worker."""
        return len(self.devices)

    @property
    def count(self) -> int:
        """Returns the number of replicas on all workers."""
        return self.cluster.workers * self.local

    @property
    def on_gpus(self) -> bool:
        """Returns whether the replicas are GPUs."""
        return self.devices[0].startswith("GPU")

    @property
    def first(self) -> int:
        """Returns the index of this worker's first replica among all."""
        return self.cluster.index * self.local

    @property
    def first_row(self) -> int:
        """Returns the index of this worker's first row in each global batch."""
        return self.first * self.rows

    def of_batch(self, size: int) -> "Replicas":
        """Returns the same replicas for a global batch of another size.

        It need not divide by their number. It is cut into as many equal parts as go into both, and
        several replicas compute each part: their mean is that of one device.
        """
        parts = math.gcd(size, self.count)
        return replace(self, rows=size // parts, global_batch_size=size, copies=self.count // parts)

    def sentence(self) -> str:
        """Describes the batch for logs and messages.

        Such as `global batch 128 = 2 workers x 2 replicas x 32`. With micro-batches: `global batch
        128 = 2 replicas x 4 micro-batches x 16`.
        """
        noun = "replica" if self.local == 1 else "replicas"
        workers = f"{self.cluster.workers} workers x " if self.cluster.several else ""
        kind = f"of {self.virtual} virtual replicas" if self.virtual else "micro-batches"
        parts = f"{self.micro_batches} {kind} x " if self.micro_batches > 1 or self.virtual else ""
        rows = self.rows // self.micro_batches
        return (
            f"global batch {self.global_batch_size} = {workers}{self.local} {noun} x {parts}{rows}"
        )

    def sum_over_workers(self, values: npt.ArrayLike) -> Vector:
        """Returns the sum over workers of `values`, of one shape everywhere, as float64.

        Every worker must call it.
        """
        self.before_sum()
        array = np.asarray(values, np.float64)
        if not self.cluster.several:
            return array
        return np.reshape(self._sum(tf.constant(array.ravel())).numpy(), array.shape)

    def from_worker(self, value: Any, index: int = 0) -> Any:
        """Returns the `value` of worker `index`, by default the chief, which must be valid in JSON.

        Every worker must call it.
        """
        if not self.cluster.several:
            return value
        is_sender = self.cluster.index == index
        text = np.frombuffer(json.dumps(value).encode(), np.uint8) if is_sender else np.zeros(0)
        length = int(self.sum_over_workers([len(text)])[0])
        sent = self.sum_over_workers(text if is_sender else np.zeros(length))
        return json.loads(sent.astype(np.uint8).tobytes())

    def refuse_differences(self, value: Mapping[str, Any], action: str) -> None:
        """Raises UserError on all workers if `value`, valid in JSON, is not the same on each.

        All must call it.
        action: as in "worker 1 and the chief do not read the same data".
        """
        names = differing(self.from_worker(value), value)
        for index in range(self.cluster.workers):
            if theirs := self.from_worker(names, index):
                raise unlike(self.cluster.name(index), action, theirs)

    @cached_property
    def _sum(self) -> Any:
        def on_replica(values: Any) -> Any:
            replica = tf.distribute.get_replica_context()
            # All replicas of a worker have the same values: only its first one counts.
            is_first = tf.cast(replica.replica_id_in_sync_group == self.first, tf.float64)
            return replica.all_reduce(tf.distribute.ReduceOp.SUM, values * is_first)

        def summed(values: Any) -> Any:
            return self.strategy.experimental_local_results(
                self.strategy.run(on_replica, args=(values,))
            )[0]

        return tf.function(
            partial(summed), input_signature=[tf.TensorSpec([None], tf.float64)], autograph=False
        )


def make_replicas(config: TrainConfig, cluster: Cluster = ONE_MACHINE) -> Replicas:
    """Builds the strategy for the visible devices.

    Raises UserError if the machine or the batch does not fit the flags. With several workers it
    must run before any other TensorFlow operation, and returns once all of them have called it.
    """
    devices = local_devices(config, cluster)
    count = len(devices) * cluster.workers
    rows = config.rows_per_replica(count)

    # GPUs sum by NCCL. TensorFlow's own AUTO uses the ring, by gRPC through the hosts, even between
    # workers with GPUs.
    gpus = len(devices) if devices[0].startswith("GPU") else 0
    collectives = "nccl" if gpus else "ring"

    # Several workers, several devices and a single one each have a strategy of TensorFlow.
    if cluster.several:
        await_silent_workers(config.worker_timeout_seconds)
        kind = tf.distribute.experimental.CommunicationImplementation[collectives.upper()]
        options = tf.distribute.experimental.CommunicationOptions(implementation=kind)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": list(cluster.addresses)}),
            task_type="worker",
            task_id=cluster.index,
            num_accelerators={"GPU": gpus} if gpus else {},
            rpc_layer="grpc",
        )
        with cpu_devices_per_worker(0 if gpus else len(devices)):
            strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    elif len(devices) > 1 or config.strategy == "mirrored":
        separate_collectives()
        strategy = tf.distribute.MirroredStrategy(list(devices))
    else:
        strategy = tf.distribute.get_strategy()
    return Replicas(
        strategy,
        devices,
        rows,
        config.global_batch_size,
        cluster,
        collectives if count > 1 else None,
        config.micro_batches_on(count),
        config.virtual_replicas,
    )


def local_devices(config: TrainConfig, cluster: Cluster) -> tuple[str, ...]:
    """Returns this worker's devices, as `GPU:0`, without starting TensorFlow.

    Raises UserError if there are too few, or if the strategy does not fit TF_CONFIG.
    """
    if cluster.several and config.strategy not in ("auto", "multi_worker"):
        raise UserError(
            f"strategy={config.strategy}, but TF_CONFIG names {cluster.workers} workers: drop"
            " --strategy, or unset TF_CONFIG for one machine"
        )
    if config.strategy == "multi_worker" and not cluster.several:
        raise UserError(
            "strategy=multi_worker, but TF_CONFIG names one machine: set it on every worker (python"
            " -m deploy local does so), or drop --strategy"
        )

    # A machine with fewer accelerators than expected is refused before it costs more.
    gpus = tf.config.get_visible_devices("GPU")
    visible = len(gpus) or simulated_devices()
    if visible < config.expect_devices:
        build = tf.sysconfig.get_build_info()
        cuda = "without CUDA"
        if build.get("is_cuda_build"):
            cuda = f"for CUDA {build.get('cuda_version', '?')}"
        raise UserError(
            f"expect_devices={config.expect_devices}, but {visible or 'no'} accelerators are"
            f" visible (TensorFlow {tf.__version__}, built {cuda}): check the machine's GPU count,"
            " its drivers and whether this TensorFlow is a GPU build (TF_CPP_MIN_LOG_LEVEL=0 shows"
            " why), or lower --expect_devices"
        )

    # GPUs are used as they are; without any, logical devices of the CPU take their place.
    count = 1 if config.strategy == "one_device" else config.replicas
    if gpus:
        if count > len(gpus):
            raise UserError(
                f"replicas={count}, but {len(gpus)} GPUs are visible: lower --replicas, or use 0"
                " for all of them"
            )
        used = gpus[: count or len(gpus)]
        with suppress(RuntimeError):  # TensorFlow has started already: it can no longer be changed
            # TensorFlow would take memory of the other GPUs too.
            tf.config.set_visible_devices(used, "GPU")
            for gpu in used:
                tf.config.experimental.set_memory_growth(gpu, True)
        return tuple(f"GPU:{index}" for index in range(len(used)))
    count = count or visible or 1
    if count > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * count
        try:
            tf.config.set_logical_device_configuration(cpu, logical)
        except RuntimeError:  # TensorFlow has started already, with a fixed number
            existing = len(tf.config.list_logical_devices("CPU"))
            if existing < count:
                raise UserError(
                    f"replicas={count}, but TensorFlow already runs in this process with {existing}"
                    " CPU devices: start a new process"
                ) from None
    return tuple(f"CPU:{index}" for index in range(count))


def simulated_devices() -> int:
    """Returns how many logical CPU devices simulate this worker's accelerators in a rehearsal.

    It is 0 for none.
    """
    return int(os.environ.get(SIMULATED, "0")) if not tf.config.get_visible_devices("GPU") else 0
