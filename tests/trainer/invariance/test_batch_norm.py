"""Tests that batch norm in place equals Keras's, up to rounding, on one replica and over several,
in float32 too."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from keras import layers
from numpy.random import default_rng
from numpy.testing import assert_allclose

from tests.fixtures import SLOW, Patch, parametrize
from tests.support import refused, slow
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.invariance.batch_norm import normalize_in_place, separate_groups
from trainer.invariance.step import StepContext, in_step

RANDOM = default_rng(0)
TOLERANCE = {"float32": 3e-5, "float64": 1e-12, "mixed_bfloat16": 0.02}
ROWS = 8


def computed(layer: layers.Layer, inputs: tf.Tensor, mask: Any = None) -> list[np.ndarray]:
    """Returns outputs, gradients by inputs and weights, the new moving statistics, and the outputs
    at inference."""
    weights = [weight.value for weight in layer.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = layer(inputs, training=True, mask=mask)
        loss = tf.reduce_sum(tf.sin(3.0 * outputs))
    found = [
        outputs,
        *tape.gradient(loss, [inputs, *weights]),
        *layer.non_trainable_variables,
        layer(inputs),
    ]
    return [np.asarray(tf.cast(value, tf.float64)) for value in found]


def pair(shape: tuple[int, ...], **settings: Any) -> tuple[layers.Layer, layers.Layer]:
    """Returns our layer and Keras's with the same weights."""
    values = [RANDOM.uniform(0.5, 1.5, shape[-1]) for _ in range(4)]
    ours, stock = (layers.BatchNormalization(momentum=0.9, **settings) for _ in range(2))
    normalize_in_place(ours, synchronized=False)
    for layer in (ours, stock):
        layer.build((None, *shape[1:]))
        layer.set_weights(values[-len(layer.weights) :])
    return ours, stock


@parametrize("precision, tolerance", TOLERANCE.items())
@parametrize(
    "shape, settings, masked",
    [
        ((8, 6, 6, 5), {}, False),
        ((8, 6, 6, 5), {"scale": False, "center": False}, False),
        ((1, 1, 2, 3), {}, False),
        ((1, 1, 1, 3), {}, False),
        ((8, 5), {}, False),
        ((8, 5, 5), {"axis": 1}, False),
        ((8, 7, 5), {}, True),
    ],
)
def test_one_replica_normalises_as_keras_does(
    precision: str, tolerance: float, shape: Any, settings: Any, masked: bool
) -> None:
    ours, stock = pair(shape, dtype=precision, **settings)
    assert type(ours) is layers.BatchNormalization
    assert ours.get_config() | {"name": ""} == stock.get_config() | {"name": ""}
    inputs = tf.cast(RANDOM.normal(2.0, 3.0, shape), ours.compute_dtype)
    mask = tf.constant(RANDOM.uniform(size=shape[:-1]) < 0.6) if masked else None
    for one, other in zip(computed(ours, inputs, mask), computed(stock, inputs, mask), strict=True):
        # Of two values a channel, gradients by the inputs cancel to nearly 0.
        assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(np.abs(other).max(), 0.1))


@parametrize("dynamic", [False, True])
def test_one_value_a_channel_gives_no_nan_even_if_the_kernels_variance_is(
    dynamic: bool, monkeypatch: Patch
) -> None:
    """A GPU's kernel may divide by the number of values less one."""
    kernel = tf.raw_ops.FusedBatchNormV3

    def as_on_a_gpu(**given: Any) -> Any:
        found = kernel(**given)
        return found._replace(batch_variance=found.batch_variance * np.nan)

    monkeypatch.setattr(tf.raw_ops, "FusedBatchNormV3", as_on_a_gpu)
    ours, _ = pair((1, 1, 1, 3))
    before = np.asarray(ours.moving_variance)
    specification = tf.TensorSpec((None, None, None, 3) if dynamic else (1, 1, 1, 3))
    outputs = tf.function(lambda x: ours(x, training=True), input_signature=[specification])(
        tf.ones((1, 1, 1, 3))
    )
    assert np.isfinite(outputs).all()
    # moved by a variance of 0
    assert_allclose(ours.moving_variance, ours.momentum * before, rtol=1e-6)


def over_replicas(
    replicas: int, precision: str, shape: tuple[int, ...], **settings: Any
) -> Callable[..., Any]:
    """Returns a function of (inputs, upstream gradient, mask) of all rows, which one layer
    normalises in training.

    It returns outputs, gradients by the inputs and those of a penalty on these, of all rows, and
    the new moving statistics.
    """
    strategy = make_replicas(TrainConfig(replicas=replicas, global_batch_size=ROWS)).strategy
    with strategy.scope():
        layer = layers.BatchNormalization(dtype=precision, epsilon=1e-12, **settings)
        layer.build((None, *shape[1:]))
    normalize_in_place(layer, synchronized=True)

    def step(inputs: Any, upstream: Any, mask: Any) -> Any:
        each = ROWS // replicas
        first = tf.distribute.get_replica_context().replica_id_in_sync_group * each
        own, up = (tf.cast(x[first : first + each], precision) for x in (inputs, upstream))
        with tf.GradientTape() as outer:
            outer.watch(own)
            with tf.GradientTape() as tape:
                tape.watch(own)
                outputs = layer(
                    own, training=True, mask=None if mask is None else mask[first : first + each]
                )
            gradient = tape.gradient(outputs, own, output_gradients=up)
            penalty = tf.reduce_sum(tf.square(gradient))
        return outputs, gradient, outer.gradient(penalty, own)

    run = tf.function(lambda *given: strategy.run(step, given))

    def computed_on_all(inputs: Any, upstream: Any, mask: Any = None) -> list[Any]:
        found = run(*(None if x is None else tf.constant(x) for x in (inputs, upstream, mask)))
        parts = (strategy.experimental_local_results(each) for each in found)
        whole = [np.concatenate([np.asarray(x, np.float64) for x in each]) for each in parts]
        return [*whole, np.asarray(layer.moving_mean), np.asarray(layer.moving_variance)]

    return computed_on_all


def error(found: Any, exact: Any) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@SLOW
def test_in_float32_several_replicas_are_as_exact_as_one() -> None:
    """A channel's mean is up to 1,000 standard deviations: a difference of means of squares loses
    the variance."""
    shape = (ROWS, 4, 4, 6)
    exact = over_replicas(1, "float64", shape)
    ours = {replicas: over_replicas(replicas, "float32", shape) for replicas in (1, 2, 4)}
    for ratio in (1, 10, 100, 1000):
        errors = np.zeros((10, 3, 2))  # (draw, replicas, outputs or gradients)
        for draw in errors:
            inputs = RANDOM.normal(ratio, 1.0, shape).astype(np.float32)
            upstream = RANDOM.normal(0.0, 1.0, shape).astype(np.float32)
            best = exact(inputs, upstream)[:2]
            for found, run in zip(draw, ours.values(), strict=True):
                found[:] = [
                    error(x, y) for x, y in zip(run(inputs, upstream)[:2], best, strict=True)
                ]
        alone, *together = np.median(errors, axis=0)
        for several in together:
            assert (several <= 3 * np.maximum(alone, 1e-6)).all(), (ratio, alone, together)


@parametrize(
    "precision, tolerance, shape, settings, masked",
    [
        ("float64", 1e-10, (ROWS, 3, 4, 5), {}, False),
        slow("float64", 1e-10, (ROWS, 5, 6), {"axis": 1, "center": False}, False),
        ("float64", 1e-10, (ROWS, 7, 5), {"scale": False}, True),
        slow("float32", 1e-3, (ROWS, 3, 4, 5), {}, False),
    ],
)
def test_replicas_normalise_as_one_does(
    precision: str, tolerance: float, shape: Any, settings: Any, masked: bool
) -> None:
    """In float32 TensorFlow's kernel normalises images, whose second derivative is the
    formula's."""
    inputs = RANDOM.normal(3.0, 2.0, shape)
    upstream = RANDOM.normal(0.0, 1.0, shape)
    mask = RANDOM.uniform(size=shape[:-1]) < 0.6 if masked else None
    if mask is not None:
        mask[: ROWS // 2] = False  # nothing of one replica counts
    one, *others = (
        over_replicas(n, precision, shape, **settings)(inputs, upstream, mask) for n in (1, 2, 4)
    )
    for other in others:
        for found, exact in zip(other, one, strict=True):
            assert_allclose(found, exact, rtol=tolerance, atol=tolerance * np.abs(exact).max())


@parametrize("precision, tolerance", TOLERANCE.items())
@parametrize("shape", [(ROWS, 6, 6, 5), (1, 1, 1, 5)])
def test_groups_of_one_pass_are_normalised_as_in_passes_of_their_own(
    precision: str, tolerance: float, shape: Any
) -> None:
    """The kernel's ways and the formula's: outputs, gradients, moving statistics."""
    together, apart = pair(shape, dtype=precision)
    groups = [tf.cast(RANDOM.normal(each, 3.0, shape), together.compute_dtype) for each in range(3)]
    with separate_groups(3):
        found = computed(together, tf.concat(groups, 0))[:-1]
    passes = [computed(apart, group)[:-1] for group in groups]
    expected = [np.concatenate([each[place] for each in passes]) for place in (0, 1)]
    expected += [np.sum([each[place] for each in passes], 0) for place in (2, 3)] + passes[-1][4:]
    for one, other in zip(found, expected, strict=True):
        # Of one value a channel, the gradient is 0: a difference of two products with 1 /
        # sqrt(epsilon), which is 32.
        assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(np.abs(other).max(), 1.0))


@parametrize("traced", [False, True])
def test_a_gradients_gradient_is_that_of_keras(traced: bool) -> None:
    """As in a penalty on gradients: the formula has a gradient of its own, which has to have one
    too."""
    ours, stock = pair((ROWS, 3, 4, 5), dtype="float64")
    inputs = tf.constant(RANDOM.normal(3.0, 2.0, (2 * ROWS, 3, 4, 5)))

    def second(layer: layers.Layer) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(inputs)
            with tf.GradientTape() as inner:
                inner.watch(inputs)
                parts = [inputs] if layer is ours else tf.split(inputs, 2)
                loss = tf.add_n(
                    [tf.reduce_sum(tf.sin(3.0 * layer(part, training=True))) for part in parts]
                )
            penalty = tf.reduce_sum(tf.square(inner.gradient(loss, inputs)))
        return outer.gradient(penalty, [inputs, layer.gamma.value])

    with separate_groups(2):
        found = (tf.function(second) if traced else second)(ours)
    for one, other in zip(found, second(stock), strict=True):
        assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_rows_of_all_passes_are_refused_with_virtual_replicas() -> None:
    layer, _ = pair((ROWS, 5))
    with (
        in_step(StepContext(3, tf.constant(0, tf.int64), 0, ROWS, ROWS, virtual_replicas=4)),
        refused(
            "normalises rows outside of current_step().accumulate: call it in there, or drop"
            " --virtual_replicas"
        ),
    ):
        layer(tf.ones((ROWS, 5)), training=True)


def test_compiled_by_xla_it_keeps_the_variance_of_a_mean_far_from_0() -> None:
    layer, _ = pair((ROWS, 6, 6, 5))
    inputs = tf.constant(RANDOM.normal(1000.0, 1.0, (ROWS, 6, 6, 5)), tf.float32)
    plain = layer(inputs, training=True)
    compiled = tf.function(lambda values: layer(values, training=True), jit_compile=True)(inputs)
    assert_allclose(compiled, plain, atol=0.01)
