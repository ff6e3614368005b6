"""Models that mix rows, or seem to, for the proof: each says what a proof has to find."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from keras import Input, Model, Sequential, layers, metrics, ops, optimizers, random
from numpy.random import default_rng

_DRAWN = default_rng(0)
_X = _DRAWN.normal(size=(320, 8)).astype("float32")
_TOKENS = _DRAWN.integers(1, 20, size=(320, 6)).astype("int32")


def table(config: Any) -> Any:
    return _X, _X.sum(1)


def tokens(config: Any) -> Any:
    return _TOKENS, _X.sum(1)


class Function(layers.Layer):
    """Computes a function of its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(name="function")
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


def _compiled(
    *parts: Any, shape: Any = (8,), dtype: Any = None, optimizer: Any = "adam", loss: Any = "mse"
) -> Any:
    model = Sequential([Input(shape, dtype=dtype), *parts])
    model.compile(optimizer, loss, metrics=["mae"])
    return model


def _with(function: Callable[..., Any]) -> Any:
    return lambda config, dataset: _compiled(
        layers.Dense(8, "relu"), Function(function), layers.Dense(1)
    )


def _number(x: Any) -> Any:
    replica = tf.distribute.get_replica_context()
    return tf.cast(replica.replica_id_in_sync_group, x.dtype) if replica else 0.0


def _some(x: Any) -> Any:
    return tf.cast(tf.size(tf.where(x > 0)), x.dtype)


def _of_action(x: Any, action: Any, earlier: Any = False) -> Any:
    row = tf.range(tf.shape(x)[0])
    if earlier is not False:
        row += -tf.cast(earlier, tf.int32)
    index = tf.stack([row, action], 1)
    return tf.gather_nd(x, index)[:, None]


picked = _with(lambda x: x + tf.reduce_mean(tf.boolean_mask(x, x[:, 0] > 0)))
mean_of_some = _with(lambda x: x + tf.reduce_mean(x) / _some(x))
reversed_rows = _with(lambda x: x + tf.reverse(x, [0]))
rolled = _with(lambda x: x + tf.roll(x, 1, 0))
cut = _with(lambda x: tf.concat([2 * x[:2], x[2:]], 0))
by_place = _with(lambda x: x * tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, None])
by_number = _with(lambda x: x * (1.0 + _number(x)))
stateful = _with(lambda x: x + tf.ensure_shape(tf.py_function(np.random.rand, [], tf.float32), ()))
shifted = _with(lambda x: tf.nn.softmax(x - tf.reduce_max(x)))
standardised = _with(lambda x: x - tf.reduce_mean(x, 0))
earlier_action = _with(lambda x: x * _of_action(x, tf.argmax(x, 1, tf.int32), x[:, 0] > 1e6))
next_row = _with(lambda x: x * tf.gather_nd(x, tf.range(1, tf.shape(x)[0] + 1)[:, None]))
own_action = _with(lambda x: x * _of_action(x, tf.argmax(x, 1, tf.int32)))
largest = _with(lambda x: tf.math.top_k(x, 8)[0])
drawn = _with(lambda x: x + random.normal((tf.shape(x)[0], 8), dtype=x.dtype))
asserted = _with(lambda x: (tf.debugging.assert_less(tf.reduce_max(x), 1e6), x)[1])
of_batch_in_branch = _with(
    lambda x: tf.cond(tf.reduce_sum(x) > 1e9, lambda: x - tf.reduce_mean(x, 0), lambda: x)
)


def _joined(texts: Any) -> Any:
    return tf.strings.join([texts, tf.broadcast_to(texts[:1], tf.shape(texts))])


def joined_texts(config: Any, dataset: Any) -> Any:
    """Splits texts by a layer whose function of the user's appends the first row to each."""
    words = layers.TextVectorization(
        standardize=_joined, output_sequence_length=4, vocabulary=["1"]
    )
    of_row = Function(lambda x: tf.strings.as_string(x[:, 0]))
    return _compiled(of_row, words, layers.Embedding(3, 4), layers.Flatten(), layers.Dense(1))


class Sampling(layers.Layer):
    """Draws around its inputs, and adds their distance from a normal distribution to the loss."""

    def __init__(self) -> None:
        super().__init__(name="sampling")
        self.seeds = random.SeedGenerator(1)

    def call(self, x: Any) -> Any:
        self.add_loss(-0.5 * ops.mean(ops.sum(1 + x - ops.square(x) - ops.exp(x), 1)))
        return x + random.normal(ops.shape(x), dtype=x.dtype, seed=self.seeds)


def sampled(config: Any, dataset: Any) -> Any:
    return _compiled(layers.Dense(2), Sampling(), layers.Dense(1))


class Tracked(Model):
    """Counts the mean loss of each step, as the guide of Keras does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(1)
        self.tracker = metrics.Mean(name="loss")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def tracked(config: Any, dataset: Any) -> Any:
    model = Tracked()
    model(_X[:2])
    model.compile("adam", "mse")
    return model


class Averaging(layers.Layer):
    """Keeps a running mean, combined over replicas as `aggregation` says."""

    def __init__(self, aggregation: str) -> None:
        super().__init__(name="averaging")
        self.aggregation = aggregation

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(
            shape=(shape[-1],),
            initializer="zeros",
            trainable=False,
            aggregation=self.aggregation,
            name="mean",
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.cast(tf.reduce_mean(x, 0), self.mean.dtype))
        return x - tf.cast(self.mean, x.dtype)


def combined(config: Any, dataset: Any) -> Any:
    return _compiled(layers.Dense(8), Averaging("mean"), layers.Dense(1))


def not_combined(config: Any, dataset: Any) -> Any:
    return _compiled(layers.Dense(8), Averaging("none"), layers.Dense(1))


def faint(config: Any, dataset: Any) -> Any:
    """Mixes rows by less than float32 rounds, before a layer of that dtype."""
    mixing = Function(lambda x: x + 1e-7 * tf.reduce_max(x))
    return _compiled(layers.Dense(8), mixing, layers.Dense(1, dtype="float32"))


def rate_by_replicas(config: Any, dataset: Any) -> Any:
    rate = 1e-3 * tf.distribute.get_strategy().num_replicas_in_sync
    return _compiled(layers.Dense(1), optimizer=optimizers.SGD(rate))


def factor_from_step_26(config: Any, dataset: Any) -> Any:
    """Adds a sum over rows that is not divided, once 25 steps are done."""
    optimizer = optimizers.SGD(1e-2)

    def loss(y: Any, p: Any) -> Any:
        begun = tf.cast(tf.convert_to_tensor(optimizer.iterations) > 25, p.dtype)
        return tf.reduce_mean((tf.reshape(y, (-1, 1)) - p) ** 2) + begun * 1e-3 * tf.reduce_sum(
            p**2
        )

    return _compiled(layers.Dense(1), optimizer=optimizer, loss=loss)


def sizes_of_rows(config: Any, dataset: Any) -> Any:
    """Has layers as wide as the rows of both traces."""
    return _compiled(layers.Dense(1004), layers.Dense(2008, "relu"), layers.Dense(1))


ones_of_rows = _with(
    lambda x: x + 1e-3 * tf.reduce_sum(tf.minimum(tf.maximum(x, tf.cast(1, x.dtype)), 1))
)


def recurrent(config: Any, dataset: Any) -> Any:
    parts = layers.Embedding(20, 8, mask_zero=True), layers.LSTM(8, dropout=0.1), layers.Dense(1)
    return _compiled(*parts, shape=(6,), dtype="int32")


def attentive(config: Any, dataset: Any) -> Any:
    inputs = Input((6,), dtype="int32")
    words = layers.Embedding(20, 8, mask_zero=True)(inputs)
    words = layers.LayerNormalization()(
        words + layers.MultiHeadAttention(2, 4, dropout=0.1)(words, words)
    )
    model = Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(words)))
    model.compile(optimizers.AdamW(global_clipnorm=1.0, use_ema=True), "huber")
    return model


def spectral(config: Any, dataset: Any) -> Any:
    return _compiled(layers.SpectralNormalization(layers.Dense(8)), layers.Dense(1))


def noisy(config: Any, dataset: Any) -> Any:
    parts = (
        layers.Dropout(0.1),
        layers.GaussianNoise(0.1),
        layers.BatchNormalization(),
        layers.UnitNormalization(),
    )
    return _compiled(
        layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2"), *parts, layers.Dense(1)
    )


# What the proof says of each: a part of its line, "" where all is proved.
FINDINGS = {
    "picked": "Where has as many rows as the values",
    "mean_of_some": "Where has as many rows as the values",
    "reversed_rows": "ReverseV2 changes the order",
    "rolled": "Roll changes the order",
    "cut": "takes some rows of one replica by their places",
    "by_place": "depends on the place in the batch",
    "standardised": "combines rows and a sum or mean",
    "joined_texts": "StringJoin has no rule",
    "largest": "",
    "earlier_action": "depends on the place in the batch",
    "next_row": "a constant follows from the number of rows",
    "own_action": "",
    "drawn": "",
    "sampled": "",
    "tracked": "",
    "by_number": "reads the number of this replica",
    "stateful": "EagerPyFunc keeps a state of its own",
    "shifted": "Max is over the rows of one replica",
    "faint": "Max is over the rows of one replica",
    "asserted": "",
    "of_batch_in_branch": "is not linear in a sum over the rows",
    "combined": "",
    "not_combined": "gives sequential/averaging/mean a sum over the rows",
    "rate_by_replicas": "sgd/learning_rate starts from other values",
    "factor_from_step_26": "adds what is divided by the rows of one replica",
    "sizes_of_rows": "",
    "ones_of_rows": "over the rows of one replica",
    "recurrent": "",
    "attentive": "",
    "spectral": "",
    "noisy": "",
}
