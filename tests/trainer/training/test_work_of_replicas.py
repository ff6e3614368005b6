"""Tests what a step costs a replica more if there are two: bytes and operations, counted in the
traced step."""

import pytest

from tests.fixtures import SLOW, Patch
from tests.support import small
from trainer.data.sources import load_dataset
from trainer.planning.planner import MeasuredStep, work_of_replicas
from trainer.training.step_operations import NO_KERNEL, operations

# of those of one replica
MOST_BYTES = 1.4
MOST_OPERATIONS = 1.9


@SLOW
def test_each_of_two_replicas_does_what_a_traced_step_of_two_does_and_little_more_than_one(
    monkeypatch: Patch,
) -> None:
    """Batch norm over replicas takes 12 passes over an activation, TensorFlow's kernel 5 for one.

    16 rows lie between those traced.
    """
    monkeypatch.setattr("trainer.models.image_layers._planned", [None])
    config = small("--data=digits", "--critic_steps=2")
    dataset = load_dataset(config)
    alone, of_two = (work_of_replicas(config, dataset, replicas) for replicas in (1, 2))
    traced = operations(MeasuredStep(config, dataset, 16, 2).graph, rows=16)
    in_graph = [op for op in traced if op.type not in NO_KERNEL]
    # one per update, and of each of two batch norms one for the critic's images and two for its own
    all_reduces = 2 + 2 * 2 + 3
    assert (of_two.all_reduces, alone.all_reduces) == (all_reduces, 0)
    assert of_two.reduced_bytes == sum(op.reduced_bytes for op in in_graph) / 2
    assert of_two.flops(16) == alone.flops(16) == sum(op.flops for op in in_graph) / 2
    moved, moved_by_two = (
        sum(op.times * op.moved_bytes.at(16) for op in work.operations) for work in (alone, of_two)
    )
    in_trace = sum(op.moved_bytes for op in in_graph if not op.reduced_bytes)
    assert moved_by_two == pytest.approx(in_trace / 2, rel=0.01)
    assert moved < moved_by_two < MOST_BYTES * moved
    count, count_of_two = (sum(op.times for op in work.operations) for work in (alone, of_two))
    assert count < count_of_two < MOST_OPERATIONS * count
