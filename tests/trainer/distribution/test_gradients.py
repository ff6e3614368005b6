"""Tests that gradients are summed once with every optimizer, and that replicas agree on overflow."""

from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import fresh_collectives
from trainer.distribution.gradients import sum_and_build
from trainer.models.optimizers import FusedAdam


def make_strategy(replicas: int) -> Any:
    fresh_collectives()
    names = [f"CPU:{index}" for index in range(replicas)]
    return tf.distribute.MirroredStrategy(names) if replicas > 1 else tf.distribute.get_strategy()


def update(replicas: int, precision: str, gradient_of: Any) -> tuple[Any, Any]:
    """Returns a weight of ones after one SGD step of size 1 with gradient_of(replica), and the optimizer."""
    strategy = make_strategy(replicas)
    with strategy.scope():
        weight = keras.Variable(np.ones(2, np.float32))
        optimizer = sum_and_build(keras.optimizers.SGD(1.0), [weight], precision)

    def on_replica() -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        gradient = gradient_of(tf.cast(replica, tf.float32))
        optimizer.apply([optimizer.scale_loss(gradient)], [weight])

    tf.function(partial(strategy.run, on_replica))()
    return weight.numpy(), optimizer


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_update_is_the_sum_over_replicas(replicas: int, precision: str) -> None:
    weight, _ = update(replicas, precision, lambda replica: tf.stack([0.25 * (replica + 1), 0.5]))
    expected = [1 - 0.25 * sum(range(1, replicas + 1)), 1 - 0.5 * replicas]
    np.testing.assert_allclose(weight, expected, rtol=1e-6)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_overflow_on_one_replica_skips_the_update_on_all(broken: int) -> None:
    gradients = [[np.inf, 1.0], [0.5, 0.5]]
    weight, optimizer = update(2, "mixed_float16", lambda replica: tf.where(replica == broken, *gradients))
    assert weight.tolist() == [1.0, 1.0]
    assert float(optimizer.dynamic_scale.numpy()) == optimizer.initial_scale / 2


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_fused_adam_equals_that_of_keras(replicas: int, dtype: str) -> None:
    strategy, states = make_strategy(replicas), []
    for kind in (FusedAdam, keras.optimizers.Adam):
        with strategy.scope():
            weights = [keras.Variable(np.linspace(-1.0, 1.0, count), dtype=dtype) for count in (2, 5)]
            optimizer = sum_and_build(kind(0.01, beta_1=0.5), weights, "float32")

        def on_replica(optimizer: Any, weights: Any) -> None:
            optimizer.apply([tf.sin(3.0 * weight.value) for weight in weights], weights)

        step = tf.function(partial(strategy.run, partial(on_replica, optimizer, weights)))
        for _ in range(5):
            step()
        states.append([variable.numpy() for variable in [*optimizer.variables, *weights]])
    for one, other in zip(*states, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5)  # Keras rounds the powers of the betas to float32
