"""Tests how the devices of this machine become replicas, and the sentence about the batch."""

import tensorflow as tf

from tests.fixtures import Patch, parametrize
from tests.support import refused
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.strategy import ONE_MACHINE, local_devices, make_replicas


@parametrize(
    "config, sentence, mirrored",
    [
        (TrainConfig(), "global batch 64 = 1 replica x 64", False),
        (TrainConfig(strategy="one_device"), "global batch 64 = 1 replica x 64", False),
        (TrainConfig(strategy="mirrored"), "global batch 64 = 1 replica x 64", True),
        (
            TrainConfig(replicas=2, global_batch_size=128),
            "global batch 128 = 2 replicas x 64",
            True,
        ),
        (TrainConfig(replicas=4), "global batch 64 = 4 replicas x 16", True),
    ],
)
def test_the_batch_is_described_in_one_sentence(
    config: TrainConfig, sentence: str, mirrored: bool
) -> None:
    replicas = make_replicas(config)
    assert replicas.sentence() == sentence
    assert isinstance(replicas.strategy, tf.distribute.MirroredStrategy) is mirrored
    assert replicas.strategy.num_replicas_in_sync == replicas.count == len(replicas.devices)


def test_gpus_that_are_hidden_are_not_used(monkeypatch: Patch) -> None:
    """Hides them as trainer.check does: TensorFlow still lists them as physical devices."""
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    others = tf.config.list_physical_devices
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind: [gpu] if kind == "GPU" else others(kind)
    )
    assert local_devices(TrainConfig(replicas=2), ONE_MACHINE) == ("CPU:0", "CPU:1")


@parametrize(
    "config, used",
    [(TrainConfig(), 4), (TrainConfig(replicas=2), 2), (TrainConfig(strategy="one_device"), 1)],
)
def test_gpus_beyond_the_replicas_are_hidden(
    config: TrainConfig, used: int, monkeypatch: Patch
) -> None:
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(4)]
    calls = []
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *given: calls.append(given))
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda *given: calls.append(given)
    )
    assert local_devices(config, ONE_MACHINE) == tuple(f"GPU:{i}" for i in range(used))
    assert calls == [(gpus[:used], "GPU"), *((gpu, True) for gpu in gpus[:used])]


@parametrize(
    "config, line",
    [
        (TrainConfig(replicas=3, global_batch_size=100), "take 99 or 102"),
        (TrainConfig(expect_devices=4), "expect_devices=4, but no accelerators are visible"),
        (TrainConfig(replicas=16), "TensorFlow already runs in this process with 4 CPU devices"),
    ],
)
def test_a_machine_or_batch_that_does_not_fit_is_refused(config: TrainConfig, line: str) -> None:
    tf.config.list_logical_devices()
    with refused(line):
        make_replicas(config)


@parametrize("device, expected", [("GPU:0", "nccl"), ("CPU:0", "ring")])
def test_workers_with_gpus_sum_by_nccl(device: str, expected: str, monkeypatch: Patch) -> None:
    """Looks at what the strategy is given: a real one of several workers needs a process each."""
    given = []
    monkeypatch.setattr(
        tf.distribute, "MultiWorkerMirroredStrategy", lambda *args: given.extend(args)
    )
    monkeypatch.setattr("trainer.cluster.strategy.local_devices", lambda *_: (device,))
    replicas = make_replicas(TrainConfig(), Cluster(("host0:1", "host1:1")))
    resolver, options = given
    assert (options.implementation.name.lower(), replicas.collectives) == (expected, expected)
    assert resolver.num_accelerators() == ({"GPU": 1} if device == "GPU:0" else {})


@parametrize(
    "build, shown",
    [
        (
            {"is_cuda_build": True, "cuda_version": "12.5.1"},
            "built for CUDA 12.5.1): check the machine's GPU count",
        ),
        ({"is_cuda_build": False}, "built without CUDA"),
    ],
)
def test_missing_gpus_are_reported_with_the_software(
    build: dict[str, object], shown: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
    with refused(f"no accelerators are visible (TensorFlow {tf.__version__}, {shown}"):
        local_devices(TrainConfig(expect_devices=4), Cluster())
