"""Runs steps whose rows stand in another order: what rounding alone changes, the control of every comparison."""

from typing import Any

import numpy as np
import tensorflow as tf

from trainer.invariance.step import StepContext
from trainer.run.training_setup import TrainingSetup
from trainer.training.steps import StepRunner


def reordered(setup: TrainingSetup, seed: int) -> tuple[StepRunner, Any]:
    """Returns a runner and its rows, in which the rows of each pass, and all draws, are permuted.

    On one replica without micro-batches, a pass is the whole global batch.
    """
    rows = setup.replicas.rows // setup.replicas.micro_batches
    order = np.random.default_rng(seed).permutation(rows)

    def in_order(values: Any, axis: int = 0) -> Any:
        firsts = np.arange(0, values.shape[axis], rows)
        return tf.gather(values, (firsts[:, None] + order).ravel(), axis=axis)

    class Reordered(StepContext):
        def draw(self, *arguments: Any, **named: Any) -> Any:
            return in_order(super().draw(*arguments, **named))

        def draw_for_all(self, *arguments: Any, **named: Any) -> Any:
            drawn = super().draw_for_all(*arguments, **named)
            if not drawn.shape.rank or drawn.shape[0] is not None:
                return drawn
            whole = (rows, *drawn.shape[1:])  # only the running step knows whether these are all rows
            return tf.cond(
                tf.equal(tf.shape(drawn)[0], rows), lambda: in_order(tf.ensure_shape(drawn, whole)), lambda: drawn
            )

    def permuted(*parts: Any) -> Any:  # (replicas, batches, rows, …)
        return tf.nest.map_structure(lambda part: in_order(part, axis=2), parts)

    runner = setup.step_runner()
    runner.context = Reordered
    return runner, iter(setup.batches_from(0).map(permuted))
