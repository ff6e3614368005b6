"""Tests what the benchmarks count against numbers computed by hand."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf

from benchmarks.networks import unet
from benchmarks.trainer_loop import step_graph
from tests.support import small
from trainer.cluster.strategy import make_replicas
from trainer.run.training_setup import build_setup
from trainer.training.step_operations import operations

ROWS = 2


def products(function: Any, *arguments: Any, loops: tuple[int, ...] = ()) -> dict[str, int]:
    """Returns FLOPs by type of operation; those of a matrix product's gradient apart."""
    found = Counter[str]()
    for op in operations(
        tf.function(function, autograph=False).get_concrete_function(*arguments).graph, loops
    ):
        if op.flops:
            backward = " backward" if op.type == "MatMul" and "gradient_tape" in op.scope else ""
            found[op.type + backward] += op.flops
    return dict(found)


PRODUCT = 2 * ROWS * 3 * 5
CONVOLUTION = 2 * ROWS * 3 * 3 * 4 * 6
KINDS = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (
            lambda: tf.keras.layers.Dense(5),
            (3,),
            {"MatMul": PRODUCT, "MatMul backward": 2 * PRODUCT},
        ),
        (
            lambda: tf.keras.layers.Conv2D(6, 3, padding="same"),
            (8, 8, 4),
            dict.fromkeys(KINDS, 8 * 8 * CONVOLUTION),
        ),
        (
            lambda: tf.keras.layers.Conv2D(6, 3, 2, padding="same"),
            (8, 8, 4),
            dict.fromkeys(KINDS, 4 * 4 * CONVOLUTION),
        ),
        # A transposed one meets its filter once a pixel of its input.
        (
            lambda: tf.keras.layers.Conv2DTranspose(6, 4, 2, padding="same"),
            (8, 8, 4),
            dict.fromkeys(KINDS, 2 * ROWS * 8 * 8 * 4 * 4 * 4 * 6),
        ),
    ],
)
def test_a_layer(make: Any, shape: tuple[int, ...], expected: dict[str, int]) -> None:
    """Counts those of the gradients of the sum of the layer's squared output, by its weights and by
    its input."""
    layer = make()
    layer.build((None, *shape))

    def gradients(images: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(images)
            loss = tf.reduce_sum(tf.square(layer(images)))
        return tape.gradient(loss, [*(weight.value for weight in layer.trainable_weights), images])

    assert products(gradients, tf.zeros((ROWS, *shape))) == expected
    without_input = products(lambda images: gradients(images)[:-1], tf.zeros((ROWS, *shape)))
    # a gradient that nobody uses is not counted
    assert sum(without_input.values()) < sum(expected.values())


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
        (lambda: sentences(LAYERS.Conv1D(32, 5)), 0),
        (lambda: network(*(LAYERS.Conv2D(16, 3, groups=4) for _ in "ab"), shape=(16, 16, 8)), 0),
        (
            lambda: network(
                LAYERS.Conv2D(8, 3), LAYERS.Conv2DTranspose(8, 4, 2), shape=(16, 16, 3)
            ),
            0,
        ),
        (lambda: network(LAYERS.Conv3D(8, 3), LAYERS.Conv3D(8, 3), shape=(8, 8, 8, 3)), 0),
        (lambda: of(unet(CONFIG, None, size=32, filters=8)), 0),
        (lambda: of(tf.keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3))), 0),
    ],
    ids=[
        "MatMul",
        "Einsum",
        "heads",
        "LSTM",
        "1-D",
        "grouped",
        "transposed",
        "3-D",
        "U-Net",
        "ResNet-50",
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
    graph = tf.function(gradients, autograph=False).get_concrete_function(spec).graph
    counted = sum(op.flops for op in operations(graph, (None, None)))
    by_hand = 2 * ROWS_OF_NETWORK * (3 * (multiplied + more) - first)
    assert counted == pytest.approx(by_hand, rel=0.01)


def test_resnet_50_has_the_products_that_were_published() -> None:
    """3.8 billion multiplications and additions, He et al. 2015 (arXiv:1512.03385, table 1)."""
    assert products_of(tf.keras.applications.ResNet50(weights=None).layers) == pytest.approx(
        3.8e9, rel=0.02
    )


def test_what_one_input_of_an_einsum_alone_has_is_summed_before_the_products() -> None:
    shapes = tf.zeros((3, 5, 7)), tf.zeros((3, 11))
    assert products(
        lambda x, y: tf.raw_ops.Einsum(inputs=[x, y], equation="bij,bk->bik"), *shapes
    ) == {"Einsum": 2 * 3 * 5 * 11}


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
    """Counts one per update, and of each of two batch norms one for the critic's images and two for
    the own ones."""
    config = small("--data=digits", "--critic_steps=2", "--replicas=2", f"--sync_batch_norm={flag}")
    setup = build_setup(config, make_replicas(config))
    summed = [op for op in operations(step_graph(setup)) if op.reduced_bytes]
    networks = (setup.model.critic, setup.model.generator)
    assert len(summed) == 2 * all_reduces  # each on both replicas
    gradients = sum(
        math.prod(weight.shape) for network in networks for weight in network.trainable_variables
    )
    # of two updates
    gradients += sum(math.prod(weight.shape) for weight in setup.model.critic.trainable_variables)
    norms = sum(op.reduced_bytes for op in summed) // 2 - 4 * gradients
    assert norms == 0 if flag == "false" else 0 < norms < gradients
