"""Tests that a global row gets the same random numbers on any number of replicas and in every
precision."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures import parametrize
from trainer.invariance.philox import NORMAL, UNIFORM
from trainer.invariance.step import StepContext, current_step, in_step


def context(step: int = 3, first_row: int = 0, rows: int = 8, seed: int = 1) -> StepContext:
    return StepContext(seed, tf.constant(step, tf.int64), first_row, rows, 8)


@parametrize("shape, rows", [((3,), 4), ((5, 2), 2), ((3, 3), 4), ((3,), 2), ((), 4)])
@parametrize("kind", ["normal", "uniform"])
def test_a_replica_draws_its_own_rows_alone_bit_by_bit(
    kind: str, shape: tuple[int, ...], rows: int
) -> None:
    """Compares with TensorFlow's function for the whole batch; rows of odd sizes are cut out of
    that."""
    draw = getattr(tf.random, f"stateless_{kind}")
    seed = context().stateless_seed("noise")
    whole = draw((8, *shape), seed=seed, alg="philox").numpy()
    drawn = []
    function = {"normal": NORMAL, "uniform": UNIFORM}[kind]
    for first in range(0, 8, rows):
        # As a tensor of int32, which the number of a replica is.
        drawn.append(
            getattr(context(first_row=tf.constant(first), rows=rows), kind)(
                shape, stream="noise"
            ).numpy()
        )
    assert np.concatenate(drawn).tobytes() == whole.tobytes()
    alone = function.rows(seed, 0, rows, shape)
    assert (alone is None) == bool(rows * int(np.prod(shape)) % 4)


def test_step_seed_and_stream_each_give_other_numbers() -> None:
    def noise(stream: str = "noise", **given: Any) -> Any:
        return context(**given).normal((100,), stream=stream).numpy()

    drawn = [noise(), noise(step=4), noise(seed=2), noise(stream="other")]
    assert np.array_equal(drawn[0], noise())
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.15


def test_double_precision_gets_the_same_numbers() -> None:
    single = context().normal((3,), "noise").numpy()
    keras.config.set_floatx("float64")
    double = context().normal((3,), "noise").numpy()
    assert double.dtype == np.float64
    assert np.array_equal(single, double)


def test_mean_divides_by_the_global_batch() -> None:
    assert float(context(rows=2).mean(tf.constant([4.0, 12.0]))) == 2.0


def test_outside_a_step_there_is_no_context() -> None:
    with pytest.raises(RuntimeError, match="no step is running"):
        current_step()
    with in_step(context()) as step:
        assert current_step() is step
    with pytest.raises(RuntimeError, match="no step is running"):
        current_step()
