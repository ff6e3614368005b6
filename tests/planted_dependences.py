"""Models as users of `fit` write them, whose numbers depend on the number of replicas, and some
whose do not."""

from typing import Any

import tensorflow as tf
from keras import Input, Model, Sequential, layers, metrics, ops, optimizers
from keras.utils import set_random_seed
from numpy.random import default_rng

_DRAWN = default_rng(0)


def _network(*hidden: layers.Layer) -> Model:
    """Returns a network of these hidden layers, or of a small one."""
    set_random_seed(0)
    stack = [
        Input((4,)),
        *(hidden or [layers.Dense(3, "tanh")]),
        layers.Dense(1),
    ]
    return Sequential(stack)


def _compiled(loss: Any, *hidden: layers.Layer, optimizer: Any = None, **options: Any) -> Model:
    model = _network(*hidden)
    model.compile(optimizer or optimizers.SGD(0.01), loss, **options)
    return model


def _centred(values: Any) -> Any:
    return values - ops.mean(values, axis=0)


def _of_batch(function: Any) -> Any:
    """Returns the `build` of a model whose loss is `function(y, p)` of the whole batch."""

    def build(config: Any, dataset: Any) -> Model:
        def loss(y: Any, p: Any) -> Any:
            return function(ops.reshape(y, (-1, 1)), p)

        return _compiled(loss)

    return build


root_of_mean = _of_batch(lambda y, p: ops.sqrt(ops.mean((y - p) ** 2)))
correlation = _of_batch(lambda y, p: -ops.mean(_centred(y) * _centred(p)) / (ops.std(p) + 1.0))
contrastive = _of_batch(lambda y, p: ops.mean((ops.matmul(p, ops.transpose(y)) - 1.0) ** 2))
summed = _of_batch(lambda y, p: ops.sum((y - p) ** 2) / 16.0)
largest = _of_batch(lambda y, p: ops.max((y - p) ** 2))
normalised = _of_batch(lambda y, p: ops.mean((y - p / ops.norm(p)) ** 2))


class _OwnStep(Model):
    """Has a train_step as the guide of Keras shows it, with a loss of `losses(y, p)`."""

    losses_of: Any = None

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = type(self).losses_of(tf.reshape(y, (-1, 1)), self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": tf.reduce_mean(loss)}


def _own(function: Any) -> Any:
    def build(config: Any, dataset: Any) -> Model:
        network = _network()
        model = type("OwnStep", (_OwnStep,), {"losses_of": staticmethod(function)})(
            network.inputs, network.outputs
        )
        model.compile(optimizers.SGD(0.001))
        return model

    return build


# whose gradient a tape adds up over the rows of a replica
row_losses = _own(lambda y, p: (y - p)[:, 0] ** 2)
mean_losses = _own(lambda y, p: tf.reduce_mean((y - p) ** 2))
own_sum = _own(lambda y, p: tf.reduce_sum((y - p) ** 2))
own_pairs = _own(
    lambda y, p: tf.reduce_mean((p - tf.transpose(p)) ** 2 * tf.abs(y - tf.transpose(y)))
)


def several_optimizers(config: Any, dataset: Any) -> Model:
    """Has another optimizer for its hidden layer."""
    parts = optimizers.OptimizerMap(optimizers.SGD(0.01), {"hidden/.*": optimizers.Adam(0.01)})
    hidden = layers.Dense(3, "tanh", name="hidden")
    return _compiled("mse", hidden, optimizer=optimizers.MultiOptimizer(parts))


class Centred(layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, values: Any) -> Any:
        return _centred(values)


def centred(config: Any, dataset: Any) -> Model:
    return _compiled("mse", layers.Dense(3), Centred())


def batch_norm(config: Any, dataset: Any, *, of_batch: bool = False) -> Model:
    """Has batch norm and, if `of_batch`, a loss that is no mean over rows."""

    def loss(y: Any, p: Any) -> Any:
        return ops.sqrt(ops.mean((y - p) ** 2)) if of_batch else (y - p) ** 2

    return _compiled(loss, layers.Dense(3), layers.BatchNormalization())


class MeanIn32Bits(metrics.Metric):
    """Adds up in float32 in any case, as many metrics of users do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        of_zeros = {"initializer": "zeros", "dtype": "float32"}
        self.total, self.rows = (
            self.add_weight(name=name, **of_zeros) for name in ("total", "rows")
        )

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        # sums of few numbers may be equal
        many = ops.abs(p) * ops.arange(1.0, 2.0, 0.01, dtype=p.dtype)
        self.total.assign_add(ops.sum(ops.cast(many, "float32")))
        self.rows.assign_add(ops.cast(ops.shape(p)[0], "float32"))

    def result(self) -> Any:
        return self.total / self.rows


def metric_in_32_bits(config: Any, dataset: Any) -> Model:
    return _compiled("mse", metrics=[MeanIn32Bits(name="mean")])


def last_layer_in_32_bits(config: Any, dataset: Any) -> Model:
    """Has what Keras advises for mixed precision."""
    stack = [layers.Dense(64, "tanh"), layers.Dense(7, "softmax", dtype="float32")]
    model = Sequential([Input((4,)), *stack, layers.Dense(1, dtype="float32")])
    model.compile(optimizers.AdamW(0.01, clipnorm=1.0), "mse")
    return model


def other_rows(config: Any) -> Any:
    x = _DRAWN.normal(size=(64, 4)).astype("float32")
    return x, x.sum(axis=1)


def other_weights(config: Any, dataset: Any) -> Model:
    model = _compiled("mse")
    model.layers[0].bias.assign(_DRAWN.normal(size=3))
    return model


def _pooled(loss: Any) -> Model:
    stack = (
        layers.Reshape((4, 1, 1, 1)),
        layers.MaxPooling3D((2, 1, 1)),
        layers.Flatten(),
    )
    return _compiled(loss, *stack)


def pooled(config: Any, dataset: Any) -> Model:
    """Has a layer that TensorFlow does not compute in float64."""
    return _pooled("mse")


def pooled_root(config: Any, dataset: Any) -> Model:
    return _pooled(lambda y, p: ops.sqrt(ops.mean((ops.reshape(y, (-1, 1)) - p) ** 2)))


def infinite(config: Any, dataset: Any) -> Model:
    """Its loss is NaN from the first step on."""
    return _compiled(lambda y, p: ops.log(-ops.mean(p**2)))


DEPENDENT = (
    "root_of_mean",
    "correlation",
    "contrastive",
    "summed",
    "largest",
    "normalised",
    "row_losses",
    "own_sum",
    "own_pairs",
    "centred",
)
INDEPENDENT = (
    "mean_losses",
    "several_optimizers",
    "metric_in_32_bits",
    "last_layer_in_32_bits",
    "pooled",
)
