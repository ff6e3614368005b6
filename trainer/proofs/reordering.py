"""Runs steps whose rows stand in another order: what rounding alone changes, the control of every comparison."""

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.invariance.step import StepContext
from trainer.run.build import TrainingSetup
from trainer.training.steps import StepRunner


def reordered(setup: TrainingSetup, seed: int) -> tuple[StepRunner, Any]:
    """Returns a runner and its rows, each global batch and all of its draws in another order.

    On one replica alone: the order spans the global batch.
    """
    order = np.random.default_rng(seed).permutation(setup.replicas.global_batch_size)

    class Reordered(StepContext):
        def draw(self, *arguments: Any, **named: Any) -> Any:
            return tf.gather(super().draw(*arguments, **named), order)

    runner = setup.step_runner()
    runner.context = Reordered
    return runner, iter(setup.batches_from(0).map(lambda *parts: _in_order(parts, order)))


def _in_order(parts: Any, order: npt.NDArray[Any]) -> Any:
    """Returns (replicas, batches, rows, …) with other rows; a nest of parts keeps its structure."""
    return tf.nest.map_structure(lambda part: tf.gather(part, order, axis=2), parts)
