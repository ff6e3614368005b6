"""What the benchmarks count, against numbers computed by hand."""

import math
from collections import Counter
from typing import Any

import pytest
import tensorflow as tf

from benchmarks.flops import operations, step_flops, step_graph
from benchmarks.profile import kind, seconds_by_kind, split
from tests.support import fresh_collectives, small
from trainer.build import build_setup
from trainer.distribution.strategy import make_replicas

ROWS = 2


def products(function: Any, *arguments: Any, loops: tuple[int, ...] = ()) -> dict[str, int]:
    """FLOPs by kind of operation."""
    found = Counter[str]()
    for op in operations(tf.function(function, autograph=False).get_concrete_function(*arguments).graph, loops):
        if op.flops:
            found[kind(op.type, op.scope)] += op.flops
    return dict(found)


def gradients_of(layer: Any, images: Any) -> Any:
    """Of the sum of what the layer makes of `images`, by its weights and by `images`."""
    with tf.GradientTape() as tape:
        tape.watch(images)
        loss = tf.reduce_sum(tf.square(layer(images)))
    return tape.gradient(loss, [*(weight.value for weight in layer.trainable_weights), images])


def test_a_dense_layer() -> None:
    layer = tf.keras.layers.Dense(5)
    layer.build((None, 3))
    once = 2 * ROWS * 3 * 5
    found = products(lambda x: gradients_of(layer, x), tf.zeros((ROWS, 3)))
    assert found == {"matrix product, forward": once, "matrix product, backward": 2 * once}


@pytest.mark.parametrize(("strides", "pixels"), [(1, 8 * 8), (2, 4 * 4)])
def test_a_convolution(strides: int, pixels: int) -> None:
    layer = tf.keras.layers.Conv2D(6, 3, strides, padding="same")
    layer.build((None, 8, 8, 4))
    once = 2 * ROWS * pixels * 3 * 3 * 4 * 6
    found = products(lambda x: gradients_of(layer, x), tf.zeros((ROWS, 8, 8, 4)))
    assert found == {
        "convolution, forward": once,
        "convolution, backward by input": once,
        "convolution, backward by filter": once,
    }


def test_a_transposed_convolution_meets_its_filter_once_a_pixel_of_its_input() -> None:
    layer = tf.keras.layers.Conv2DTranspose(6, 4, 2, padding="same")
    layer.build((None, 8, 8, 4))
    once = 2 * ROWS * 8 * 8 * 4 * 4 * 4 * 6
    found = products(lambda x: gradients_of(layer, x), tf.zeros((ROWS, 8, 8, 4)))
    assert set(found.values()) == {once}
    assert len(found) == 3


def test_a_gradient_that_no_one_asks_for_is_not_counted() -> None:
    layer = tf.keras.layers.Conv2D(6, 3)
    layer.build((None, 8, 8, 4))
    found = products(lambda x: gradients_of(layer, x)[0], tf.zeros((ROWS, 8, 8, 4)))
    assert "convolution, backward by input" not in found


def test_a_loop_counts_as_often_as_it_runs() -> None:
    @tf.function
    def inner(x: Any) -> Any:
        return x @ x

    def looped(x: Any, turns: Any) -> Any:
        return tf.while_loop(lambda i, _: i < turns, lambda i, x: (i + 1, inner(x)), (0, x))[1]

    given = (tf.zeros((4, 4)), tf.constant(7))
    assert products(looped, *given, loops=(7,)) == {"matrix product, forward": 7 * 2 * 4**3}
    with pytest.raises(ValueError, match="nothing says how often"):
        products(looped, *given)


def test_the_step_of_a_wgan_gp_scales_with_its_critic_steps() -> None:
    one, two, three = (
        step_flops(build_setup(config, make_replicas(config)))
        for config in (small(f"--critic_steps={steps}", "--data=digits") for steps in (1, 2, 3))
    )
    assert three - two == two - one
    assert one > two - one > 0  # the generator's update is the rest


@pytest.mark.parametrize(("flag", "all_reduces"), [("true", 2 * 3 + 2), ("false", 2)])
def test_all_reduces_of_a_step(flag: str, all_reduces: int) -> None:
    """One an optimizer; and one a pass of each of two batch norms (fakes, generator, its gradient)."""
    fresh_collectives()
    config = small("--data=digits", "--critic_steps=1", "--replicas=2", f"--sync_batch_norm={flag}")
    assembly = build_setup(config, make_replicas(config))
    summed = [op for op in operations(step_graph(assembly)) if op.reduced_bytes]
    networks = (assembly.model.critic, assembly.model.generator)
    assert len(summed) == 2 * all_reduces  # each on both replicas
    gradients = sum(math.prod(weight.shape) for network in networks for weight in network.trainable_variables)
    norms = sum(op.reduced_bytes for op in summed) // 2 - 4 * gradients
    assert norms == 0 if flag == "false" else 0 < norms < gradients


def test_double_backward_is_told_from_backward() -> None:
    scope = "while/body/_1/StatefulPartitionedCall/gradient_tape/critic_3/conv2d_1/convolution"
    assert kind("_MklNativeConv2DBackpropFilterWithBias", scope) == "convolution, backward by filter"
    twice = scope.replace("gradient_tape", "gradient_tape/gradient_tape")
    assert kind("_MklNativeConv2D", twice) == "convolution, double backward"
    assert kind("_MklNativeFusedConv2D", "while/critic_3/conv2d_1/BiasAdd") == "convolution, forward"
    assert kind("AssignSubVariableOp", "while/body/_1/while/adam_1_1/sub_17") == "optimizer"


def test_a_moment_is_split_among_what_runs_in_it() -> None:
    second = 10**12
    call = (0, 10 * second, "benchmark_call")
    found = split([call, (1 * second, 4 * second, "a"), (2 * second, 6 * second, "b"), (7 * second, 9 * second, "a")])
    assert found == {"Python: before and after": 2, "dispatch: no operation runs": 1, "a": 4, "b": 3}


def test_the_profile_knows_the_convolutions_of_a_call() -> None:
    layer = tf.keras.layers.Conv2D(32, 3)
    function, images = tf.function(lambda x: gradients_of(layer, x)[0]), tf.zeros((8, 64, 64, 8))
    function(images)
    seconds = seconds_by_kind(lambda: function(images).numpy())
    assert {"convolution, forward", "convolution, backward by filter"} <= set(seconds)
    assert all(value > 0 for value in seconds.values())
