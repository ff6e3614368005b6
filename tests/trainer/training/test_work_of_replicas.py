"""Tests what a step costs a replica more if there are two: bytes and operations, counted in the traced step."""

import pytest

from benchmarks.trainer_loop import setup_of, traced_steps
from tests.fixtures import Patch
from tests.gpu_graph import GpuStep, optimised
from trainer.training.step_operations import NO_KERNEL, operations

ROWS = 64  # of a replica
MOST_BYTES, MOST_OPERATIONS = 1.4, 1.9  # of those of one replica


def of_replicas(replicas: int, *flags: str) -> tuple[float, int]:
    """Returns the GB that a replica's step moves, and its operations as TensorFlow simplifies them.

    CPU:1 and CPU:2 stand for GPUs, as in test_gpu_steps.py.
    """
    traced = traced_steps(setup_of(*flags, f"--replicas={replicas}", f"--global_batch_size={ROWS * replicas}"))
    moved = sum(op.moved_bytes for op in operations(traced.graph) if op.type not in NO_KERNEL)
    return moved / 1e9 / replicas, GpuStep(optimised(traced)).counts(0 if replicas > 1 else None)["operations"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    pytest.param(("--recipe=dcgan_mnist", "--data=digits"), id="dcgan"),
    pytest.param(("--recipe=wgan_gp_mnist", "--data=digits"), id="wgan_gp"),
])  # fmt: skip
def test_a_replica_of_two_does_little_more_than_one(flags: tuple[str, ...], monkeypatch: Patch) -> None:
    """Batch norm over replicas takes 12 passes over an activation, TensorFlow's kernel 5 for one."""
    monkeypatch.setattr(
        "trainer.cluster.strategy.local_devices",
        lambda config, cluster: tuple(f"CPU:{i + 1}" for i in range(max(1, config.replicas))),
    )
    monkeypatch.setattr("trainer.models.image_layers._planned", [None])
    (gb, count), (gb_of_two, count_of_two) = (of_replicas(replicas, *flags) for replicas in (1, 2))
    print(f"{gb:.2f} GB and {count:,.0f} operations; of two {gb_of_two:.2f} and {count_of_two:,.0f}")
    assert gb < gb_of_two <= MOST_BYTES * gb
    assert count < count_of_two <= MOST_OPERATIONS * count
