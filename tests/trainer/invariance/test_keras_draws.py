"""Tests that layers of Keras draw the same for a global row on any number of replicas."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import Sequential, layers, ops
from keras.random import SeedGenerator
from keras.utils import set_random_seed
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from tests.fixtures import SLOW, Log, parametrize
from tests.support import refused, slow
from trainer.invariance.internals import layers_by_path, reset_layer_names, seed_initializers
from trainer.invariance.keras_draws import draw_by_row, draw_by_row_everywhere
from trainer.invariance.layers import _DEPENDENT
from trainer.invariance.step import StepContext, in_step

ROWS = 8
RANDOM = default_rng(0)
WORDS, IMAGES = (
    RANDOM.uniform(1, 254, (ROWS, *shape)).astype(np.float32) for shape in ((6, 5), (12, 12, 3))
)
Function = Callable[[Any], Any]


def independent(make: Callable[[], Any], inputs: Any) -> Any:
    """Returns a new layer that draws by row, built by a call with `inputs`."""
    reset_layer_names()
    set_random_seed(0)
    # once a test in this process has called it, the line before seeds no layer
    seed_initializers(0)
    draw_by_row_everywhere()
    layer = make()
    layer(inputs)
    for path, each in layers_by_path(layer).items():
        draw_by_row(each, path)
    return layer


def on_replica(
    function: Function, inputs: Any, rows: int = ROWS, replica: int = 0, step: int = 0
) -> Any:
    """Returns what `function` gives, traced in a step, for the rows of one replica with `rows`
    rows."""
    own = tf.constant(inputs[replica * rows : (replica + 1) * rows])

    @tf.autograph.experimental.do_not_convert
    def traced(values: Any, number: Any) -> Any:
        with in_step(StepContext(3, number, replica * rows, rows, ROWS)):
            return function(values)

    return tf.function(traced)(own, tf.constant(step, tf.int64)).numpy()


def trained(layer: Any) -> Function:
    return lambda values: layer(values, training=True)


class Noisy(layers.Layer):
    """Draws for rows, for all rows alike, and for weights with as many inputs as a replica has
    rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = [SeedGenerator(1), SeedGenerator(2)]
        self.inner = layers.Dropout(0.5)

    def call(self, values: Any, training: bool = False) -> Any:
        one, other = self.seeds
        noise = keras.random.normal(ops.shape(values), seed=one) + keras.random.uniform(
            (1,), seed=one
        )
        weights = keras.random.truncated_normal((4, values.shape[-1]), seed=other)
        shift = keras.random.uniform((ops.shape(values)[0], 1, 1), 0.5, 2.0, seed=other)
        count = keras.random.randint((ops.shape(values)[0], 1, 1), 0, 9, dtype="int64", seed=other)
        return (
            self.inner(values + noise, training=training)
            + weights[0]
            + shift
            + ops.cast(count, values.dtype)
        )


LAYERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "Dropout": (lambda: layers.Dropout(0.4), WORDS),
    "noise_shape": (lambda: layers.Dropout(0.4, noise_shape=(None, 1, 5)), WORDS),
    "one_mask": (lambda: layers.Dropout(0.4, noise_shape=(1, 6, 5)), WORDS),
    "SpatialDropout1D": (lambda: layers.SpatialDropout1D(0.4), WORDS),
    "TimeDistributed": (lambda: layers.TimeDistributed(layers.Dropout(0.4)), WORDS),
    "LSTM": (lambda: layers.LSTM(4, dropout=0.3, recurrent_dropout=0.3), WORDS),
    "RandomCrop": (lambda: layers.RandomCrop(9, 7), IMAGES),
}


QUICK = ("Dropout", "noise_shape", "TimeDistributed", "LSTM", "RandomCrop")


@parametrize("name", [*QUICK, *(slow(name) for name in LAYERS if name not in QUICK)])
def test_a_row_gets_the_same_numbers_on_any_number_of_replicas(name: str, caplog: Log) -> None:
    make, inputs = LAYERS[name]
    layer = independent(make, inputs)
    whole = on_replica(trained(layer), inputs)
    for rows, replica in ((4, 1), (1, 6)):
        part = on_replica(trained(layer), inputs, rows, replica)
        assert_allclose(part, whole[replica * rows : (replica + 1) * rows], rtol=1e-4, atol=1e-4)
    assert not np.array_equal(whole, on_replica(trained(layer), inputs, step=1))
    assert not np.array_equal(whole, layer(inputs, training=False))
    assert "depends on the number" not in caplog.text


@SLOW  # traces every layer of Keras that draws
def test_every_layer_of_keras_that_draws_does_so_by_row_or_is_named() -> None:
    needed = {
        **dict.fromkeys(("factor", "stddev", "addition_factor"), 0.3),
        **dict.fromkeys(("height_factor", "width_factor", "hue_factor"), 0.2),
        **dict.fromkeys(("brightness_factor", "x_factor"), 0.2),
        "height": 9,
        "width": 7,
        "rate": 0.4,
    }
    found = {}
    kinds = [
        x
        for x in vars(layers).values()
        if inspect.isclass(x) and "seed" in inspect.signature(x).parameters
    ]
    for kind in kinds:
        takes = inspect.signature(kind).parameters
        given = {name: value for name, value in needed.items() if name in takes}
        if kind is layers.RandomPosterization:
            given["factor"] = 4
        try:
            layer = independent(lambda: kind(**given), IMAGES)  # noqa: B023
        except (TypeError, ValueError):  # it takes other inputs: recurrent layers, attention
            continue
        whole, part = (
            on_replica(trained(layer), IMAGES, rows, replica) for rows, replica in ((8, 0), (4, 1))
        )
        found[kind.__name__] = bool(np.allclose(part, whole[4:], rtol=1e-3, atol=0.1))
    assert len(found) > 20
    assert {name for name, same in found.items() if not same} == set(_DEPENDENT) & set(found)


def test_dropout_drops_its_share_and_scales_the_rest() -> None:
    ones = np.ones((ROWS, 4000), np.float32)
    found = on_replica(trained(independent(lambda: layers.Dropout(0.25), ones)), ones)
    assert set(np.unique(found)) == {0.0, np.float32(1 / 0.75)}
    assert abs((found == 0).mean() - 0.25) < 0.01
    for rate in (0.0, 1.0):
        same = on_replica(trained(independent(partial(layers.Dropout, rate), ones)), ones)
        assert set(np.unique(same)) == {1.0 - rate}


def test_a_layer_used_twice_draws_anew_and_layers_of_one_name_draw_apart() -> None:
    def tower() -> Any:
        return Sequential([layers.Dropout(0.5, name="drop")], name="tower")

    class Two(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.towers = [tower(), tower()]

        def call(self, values: Any, training: bool = False) -> Any:
            return [each(values, training=training) for each in (*self.towers, self.towers[0])]

    model = independent(Two, WORDS)
    first, second, again = on_replica(lambda x: tf.stack(model(x, training=True)), WORDS) == 0
    for one, other in ((first, second), (first, again), (second, again)):
        assert 0.3 < (one == other).mean() < 0.7


@parametrize(
    "make, function, line",
    [
        (
            lambda: layers.Dropout(0.5),
            lambda x: tf.reshape(x, (-1, 5)),
            "dropout: it draws random numbers for 24 parts of",
        ),
        (
            lambda: layers.Dropout(0.5),
            lambda x: tf.gather(x, [0, 1, 2, 3] * 4),
            "dropout: it draws random numbers for 16",
        ),
        (
            lambda: layers.LSTM(4, dropout=0.3),
            lambda x: tf.tile(x, [2, 1, 1]),
            "lstm_cell: it draws random numbers for 8",
        ),
        (
            layers.Identity,
            lambda x: x + keras.random.gamma(x.shape, 0.5),
            "keras.random.gamma draws other numbers on several replicas or",
        ),
        (
            layers.Identity,
            lambda x: x + keras.random.beta(x.shape, 0.2, 0.2),
            "keras.random.beta draws other numbers on several replicas or",
        ),
    ],
)
@parametrize("rows", [4, ROWS])
def test_what_is_refused_on_several_replicas_runs_on_one(
    make: Callable[[], Any], function: Function, line: str, rows: int
) -> None:
    layer = independent(make, WORDS)
    keras.random.normal(())  # makes the generator of Keras
    with refused(line) if rows < ROWS else nullcontext():
        on_replica(lambda values: layer(function(values), training=True), WORDS, rows)


def test_without_a_layer_keras_random_draws_by_row_too() -> None:
    draw_by_row_everywhere()
    hidden = SeedGenerator(1)  # held by no layer that Keras tracks
    keras.random.normal(())  # makes the generator of Keras

    def noise(rows: Any) -> Any:
        return keras.random.normal(rows.shape) + keras.random.normal(rows.shape, seed=hidden)

    whole = on_replica(noise, WORDS)
    assert_array_equal(on_replica(noise, WORDS, 4, 1), whole[4:])


@parametrize("of_a_layer", [True, False])
@parametrize("kept", [0.0, 100.0])
def test_rows_that_only_the_running_step_counts_are_drawn_by_row(
    kept: float, of_a_layer: bool, caplog: Log
) -> None:
    layer = independent(lambda: layers.Dropout(0.5), WORDS)
    keras.random.normal(())  # makes the generator of Keras

    def some_rows(values: Any) -> Any:
        chosen = tf.boolean_mask(values, values[:, 0, 0] > kept)  # (None, 6, 5)
        return (
            layer(chosen, training=True)
            if of_a_layer
            else chosen + keras.random.normal(tf.shape(chosen))
        )

    whole = on_replica(some_rows, WORDS)
    part = on_replica(some_rows, WORDS, 4, 1)
    assert len(part) == (WORDS[4:, 0, 0] > kept).sum()
    if kept:  # trains, but nobody knows which row of the batch each of them is
        assert "depends on the number of replicas: " in caplog.text
        assert "of unknown size, is not one of rows" in caplog.text
    else:
        assert_array_equal(part, whole[4:])
        assert "depends on the number" not in caplog.text


def looped(values: Any, layer: Any) -> Any:
    return tf.while_loop(
        lambda i, x: i < 2, lambda i, x: (i + 1, layer(x, training=True)), (0, values)
    )[1]


@parametrize(
    "function, line",
    [
        (looped, "dropout draws random numbers inside a loop"),
        (
            lambda x, _: tf.function(lambda y: keras.random.normal(y.shape))(x),
            "keras.random draws random numbers inside",
        ),
        (
            lambda x, layer: layer(tf.transpose(x, [1, 0, 2]), training=True),
            "dropout draws random numbers for inputs",
        ),
        (lambda x, _: keras.random.shuffle(x), "keras.random mixes the rows of one replica"),
        (
            lambda x, _: keras.random.categorical(x[:, 0], 1),
            "keras.random draws by keras.random.categorical",
        ),
    ],
)
@parametrize("rows", [4, ROWS])
def test_what_cannot_be_drawn_by_row_is_named(
    function: Callable[..., Any], line: str, rows: int, caplog: Log
) -> None:
    layer = independent(lambda: layers.Dropout(0.5), WORDS)
    keras.random.normal(())
    on_replica(lambda values: function(values, layer), WORDS, rows)
    assert (f"the result depends on the number of replicas: {line}" in caplog.text) is (rows < ROWS)


def test_a_branch_of_a_condition_is_no_loop(caplog: Log) -> None:
    layer = independent(lambda: layers.Dropout(0.5), WORDS)

    def either(values: Any) -> Any:
        return tf.cond(
            tf.reduce_sum(values) > 0, lambda: layer(values, training=True), lambda: values
        )

    assert_array_equal(on_replica(either, WORDS, 4, 1), on_replica(either, WORDS)[4:])
    assert "depends on the number" not in caplog.text


def test_draws_in_what_xla_compiles_are_refused() -> None:
    layer = independent(lambda: layers.Dropout(0.5), WORDS)
    with refused("dropout: random numbers are drawn in a function that XLA compiles"):
        on_replica(tf.function(trained(layer), jit_compile=True), WORDS, 4)
    with (
        refused("noise: random numbers are drawn in a function that XLA compiles"),
        in_step(StepContext(3, tf.constant(0, tf.int64), 0, ROWS, ROWS)) as step,
    ):
        tf.function(lambda: step.normal((3,), "noise"), jit_compile=True)()


def test_outside_of_steps_keras_draws_as_ever() -> None:
    layer = independent(lambda: layers.Dropout(0.5, seed=4), WORDS)
    stock = layers.Dropout(0.5, seed=4)
    for _ in range(2):
        assert_array_equal(layer(WORDS, training=True), stock(WORDS, training=True))
    assert type(layer) is layers.Dropout
    assert layer.get_config() | {"name": ""} == stock.get_config() | {"name": ""}
