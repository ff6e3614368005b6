"""Tests what the benchmarks count against numbers computed by hand."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf

from benchmarks.networks import unet
from tests.support import small
from trainer.training.step_operations import operations

ROWS = 2


def flops_of(function: Any, *arguments: Any, loops: tuple[int | None, ...] = ()) -> int:
    made = tf.function(function, autograph=False).get_concrete_function(*arguments)
    return sum(op.flops for op in operations(made.graph, loops))


ROWS_OF_NETWORK = 2
LENGTH = 24
WIDTH = 16
HEADS = 4
ATTENTION = 2 * LENGTH * LENGTH * WIDTH  # scores, and the sum of values that they weigh, of a row


class ByMatMul(tf.keras.layers.Layer):
    """Is an attention of one head by tf.matmul."""

    def call(self, x: Any) -> Any:
        return tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x)


class ByEinsum(tf.keras.layers.Layer):
    """Is the same by tf.einsum, with an ellipsis."""

    def call(self, x: Any) -> Any:
        weights = tf.nn.softmax(tf.einsum("...qd,...kd->...qk", x, x))
        return tf.einsum("...qk,...kd->...qd", weights, x)


def products_of(layers: Sequence[Any]) -> int:
    """Returns the multiplications of Dense layers and convolutions for a row, forward, by their
    shapes."""
    total = 0
    for layer in layers:
        if isinstance(layer, tf.keras.layers.Dense) or "Conv" in type(layer).__name__:
            dense = layer.input if "Transpose" in type(layer).__name__ else layer.output
            total += math.prod(dense.shape[1:-1]) * math.prod(layer.kernel.shape)
    return total


def network(*layers: Any, shape: tuple[int, ...]) -> tuple[Any, int]:
    """Returns these layers as a model, and its multiplications of a row that Dense and convolutions
    have."""
    model = tf.keras.Sequential([tf.keras.Input(shape), *layers])
    return model, products_of(model.layers)


def sentences(*layers: Any) -> tuple[Any, int]:
    return network(tf.keras.layers.Dense(WIDTH), *layers, shape=(LENGTH, WIDTH))


def multi_head() -> tuple[Any, int]:
    x = tf.keras.Input((LENGTH, WIDTH))
    first = tf.keras.layers.Dense(WIDTH)
    y = first(x)
    attended = tf.keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)
    return tf.keras.Model(x, attended), products_of([first]) + 4 * LENGTH * WIDTH * WIDTH


def of(model: Any) -> tuple[Any, int]:
    return model, products_of(model.layers)


CONFIG = small("--data=digits")
LAYERS = tf.keras.layers


@pytest.mark.parametrize(
    ("made", "more"),
    [
        (lambda: sentences(ByMatMul()), ATTENTION),
        (lambda: sentences(ByEinsum()), ATTENTION),
        (multi_head, ATTENTION),
        (lambda: sentences(LAYERS.LSTM(32)), LENGTH * 4 * 32 * (WIDTH + 32)),
        (lambda: network(*(LAYERS.Conv2D(16, 3, groups=4) for _ in "ab"), shape=(16, 16, 8)), 0),
        (lambda: network(LAYERS.Conv3D(8, 3), LAYERS.Conv3D(8, 3), shape=(8, 8, 8, 3)), 0),
        (lambda: of(unet(CONFIG, None, size=32, filters=8)), 0),
    ],
)
def test_a_step_of_a_network_has_the_flops_that_its_shapes_give(made: Any, more: int) -> None:
    """Backward has two products for each forward, but for the first layer, whose input needs no
    gradient."""
    model, multiplied = made()
    first = next(products_of([layer]) for layer in model.layers if products_of([layer]))

    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        return tape.gradient(loss, [weight.value for weight in model.trainable_weights])

    spec = tf.TensorSpec((ROWS_OF_NETWORK, *model.input_shape[1:]))
    by_hand = 2 * ROWS_OF_NETWORK * (3 * (multiplied + more) - first)
    assert flops_of(gradients, spec, loops=(None, None)) == pytest.approx(by_hand, rel=0.01)


def test_what_one_input_of_an_einsum_alone_has_is_summed_before_the_products() -> None:
    shapes = tf.zeros((3, 5, 7)), tf.zeros((3, 11))
    flops = flops_of(lambda x, y: tf.raw_ops.Einsum(inputs=[x, y], equation="bij,bk->bik"), *shapes)
    assert flops == 2 * 3 * 5 * 11


def test_a_loop_counts_as_often_as_it_runs() -> None:
    @tf.function
    def inner(x: Any) -> Any:
        return x @ x

    def looped(x: Any, turns: Any) -> Any:
        return tf.while_loop(lambda i, _: i < turns, lambda i, x: (i + 1, inner(x)), (0, x))[1]

    given = (tf.zeros((4, 4)), tf.constant(7))
    assert flops_of(looped, *given, loops=(7,)) == 7 * 2 * 4**3
    with pytest.raises(ValueError, match="is a loop without a number of iterations"):
        flops_of(looped, *given)
