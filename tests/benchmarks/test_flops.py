"""Tests what the benchmarks count against numbers computed by hand."""

import math
from collections import Counter
from typing import Any

import pytest
import tensorflow as tf

from benchmarks.trainer_loop import step_graph
from tests.support import small
from trainer.cluster.strategy import make_replicas
from trainer.run.training_setup import build_setup
from trainer.training.step_operations import operations

ROWS = 2


def products(function: Any, *arguments: Any, loops: tuple[int, ...] = ()) -> dict[str, int]:
    """Returns FLOPs by type of operation; those of a matrix product's gradient apart."""
    found = Counter[str]()
    for op in operations(tf.function(function, autograph=False).get_concrete_function(*arguments).graph, loops):
        if op.flops:
            backward = " backward" if op.type == "MatMul" and "gradient_tape" in op.scope else ""
            found[op.type + backward] += op.flops
    return dict(found)


PRODUCT, CONVOLUTION = 2 * ROWS * 3 * 5, 2 * ROWS * 3 * 3 * 4 * 6
KINDS = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


@pytest.mark.parametrize(("make", "shape", "expected"), [
    (lambda: tf.keras.layers.Dense(5), (3,), {"MatMul": PRODUCT, "MatMul backward": 2 * PRODUCT}),
    (lambda: tf.keras.layers.Conv2D(6, 3, padding="same"), (8, 8, 4), dict.fromkeys(KINDS, 8 * 8 * CONVOLUTION)),
    (lambda: tf.keras.layers.Conv2D(6, 3, 2, padding="same"), (8, 8, 4), dict.fromkeys(KINDS, 4 * 4 * CONVOLUTION)),
    # A transposed one meets its filter once a pixel of its input.
    (lambda: tf.keras.layers.Conv2DTranspose(6, 4, 2, padding="same"), (8, 8, 4),
     dict.fromkeys(KINDS, 2 * ROWS * 8 * 8 * 4 * 4 * 4 * 6)),
])  # fmt: skip
def test_a_layer(make: Any, shape: tuple[int, ...], expected: dict[str, int]) -> None:
    """Counts those of the gradients of the sum of the layer's squared output, by its weights and by its input."""
    layer = make()
    layer.build((None, *shape))

    def gradients(images: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(images)
            loss = tf.reduce_sum(tf.square(layer(images)))
        return tape.gradient(loss, [*(weight.value for weight in layer.trainable_weights), images])

    assert products(gradients, tf.zeros((ROWS, *shape))) == expected
    without_input = products(lambda images: gradients(images)[:-1], tf.zeros((ROWS, *shape)))
    assert sum(without_input.values()) < sum(expected.values())  # a gradient that nobody uses is not counted


def test_a_loop_counts_as_often_as_it_runs() -> None:
    @tf.function
    def inner(x: Any) -> Any:
        return x @ x

    def looped(x: Any, turns: Any) -> Any:
        return tf.while_loop(lambda i, _: i < turns, lambda i, x: (i + 1, inner(x)), (0, x))[1]

    given = (tf.zeros((4, 4)), tf.constant(7))
    assert products(looped, *given, loops=(7,)) == {"MatMul": 7 * 2 * 4**3}
    with pytest.raises(ValueError, match="is a loop without a number of iterations"):
        products(looped, *given)


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "all_reduces"), [("true", 2 + 2 * 2 + 3), ("false", 3)])
def test_all_reduces_of_a_step(flag: str, all_reduces: int) -> None:
    """Counts one per update, and of each of two batch norms one for the critic's images and two for the own ones."""
    config = small("--data=digits", "--critic_steps=2", "--replicas=2", f"--sync_batch_norm={flag}")
    setup = build_setup(config, make_replicas(config))
    summed = [op for op in operations(step_graph(setup)) if op.reduced_bytes]
    networks = (setup.model.critic, setup.model.generator)
    assert len(summed) == 2 * all_reduces  # each on both replicas
    gradients = sum(math.prod(weight.shape) for network in networks for weight in network.trainable_variables)
    gradients += sum(math.prod(weight.shape) for weight in setup.model.critic.trainable_variables)  # of two updates
    norms = sum(op.reduced_bytes for op in summed) // 2 - 4 * gradients
    assert norms == 0 if flag == "false" else 0 < norms < gradients
