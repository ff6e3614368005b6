"""Tests gradients of embeddings over replicas, moving averages, and Keras's own tests with our
parts; test_internals.py and tests/trainer/models/test_as_fit.py have optimizers."""

import unittest
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import Variable, layers, optimizers
from numpy.testing import assert_allclose

from tests.fixtures import SLOW, Patch, parametrize
from trainer.invariance.batch_norm import normalize_in_place
from trainer.invariance.gradients import sum_first, update_average
from trainer.invariance.internals import separate_collectives


def make_strategy(replicas: int) -> Any:
    separate_collectives()
    names = [f"CPU:{index}" for index in range(replicas)]
    return tf.distribute.MirroredStrategy(names) if replicas > 1 else tf.distribute.get_strategy()


def test_an_embeddings_gradient_is_summed_without_a_wait() -> None:
    """Rows that come twice, in one replica and in both; of a small table, and of one larger than
    all slices."""
    rows = np.array([1, 1, 3, 0, 3, 3], np.int32)
    for size in (5, 40):
        found = []
        for replicas in (1, 2):
            strategy = make_strategy(replicas)
            with strategy.scope():
                table = Variable(np.ones((size, 2)), dtype="float64")
                optimizer = optimizers.Adam(0.1)
                optimizer.build([table])
                sum_first(optimizer)

            def on_replica() -> None:
                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                count = len(rows) // replicas  # noqa: B023
                part = tf.reshape(
                    tf.constant(rows)[replica * count : (replica + 1) * count], (count,)
                )
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.square(tf.gather(table.value, part)))  # noqa: B023
                optimizer.apply(tape.gradient(loss, [table.value]), [table])  # noqa: B023

            step = tf.function(partial(strategy.run, on_replica))
            step()
            names = {op.type for op in step.get_concrete_function().graph.get_operations()}
            assert names.isdisjoint({"Unique", "CollectiveGatherV2"})
            found.append(table.numpy())
        assert_allclose(found[1], found[0], rtol=1e-12)
        assert np.flatnonzero(found[0][:, 0] != 1.0).tolist() == [0, 1, 3]


def fused_updates(monkeypatch: Patch) -> None:
    build = optimizers.Adam.build

    def changed(self: Any, variables: Any) -> None:
        built = self.built
        build(self, variables)
        if not built:
            sum_first(self)

    monkeypatch.setattr(optimizers.Adam, "build", changed)


def normalized_in_place(monkeypatch: Patch) -> None:
    init = layers.BatchNormalization.__init__

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        normalize_in_place(self, synchronized=False)

    monkeypatch.setattr(layers.BatchNormalization, "__init__", changed)


@SLOW
@parametrize(
    "module, put",
    [
        ("keras.src.optimizers.adam_test", fused_updates),
        ("keras.src.layers.normalization.batch_normalization_test", normalized_in_place),
    ],
)
def test_keras_own_tests_pass_with_our_parts_in_place(
    module: str, put: Any, monkeypatch: Patch
) -> None:
    """Runs the tests that Keras ships: of its optimizer with ours, of its layer with the call that
    we put in place."""
    tests = pytest.importorskip(module)
    put(monkeypatch)
    suite = unittest.defaultTestLoader.loadTestsFromModule(tests)
    result = unittest.TestResult()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite.run(result)
    assert result.testsRun >= 8
    assert [(str(test), lines[-400:]) for test, lines in (*result.errors, *result.failures)] == []


@parametrize("step, kept", [(0, 0.1), (80, 0.9), (10**6, 0.99)])
def test_a_moving_average_follows_faster_in_its_first_steps(step: int, kept: float) -> None:
    """Its decay is that of tf.train.ExponentialMovingAverage with num_updates."""
    average = Variable([0.0, 4.0])
    weights = Variable([1.0, 2.0])
    update_average([average], [weights], 0.99, tf.constant(step))
    assert_allclose(average.numpy(), [1 - kept, 4 * kept + 2 * (1 - kept)], rtol=1e-6)
