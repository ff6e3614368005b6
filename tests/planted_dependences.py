"""Models as users of `fit` write them, whose numbers depend on the number of replicas, and some
whose do not."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

_DRAWN = np.random.default_rng(0)


def _network(*hidden: keras.layers.Layer) -> keras.Model:
    """Returns a network of these hidden layers, or of a small one."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((4,)),
        *(hidden or [keras.layers.Dense(3, "tanh")]),
        keras.layers.Dense(1),
    ]
    return keras.Sequential(layers)


def _compiled(
    loss: Any, *hidden: keras.layers.Layer, optimizer: Any = None, **options: Any
) -> keras.Model:
    model = _network(*hidden)
    model.compile(optimizer or keras.optimizers.SGD(0.01), loss, **options)
    return model


def _centred(values: Any) -> Any:
    return values - keras.ops.mean(values, axis=0)


def _of_batch(function: Any) -> Any:
    """Returns the `build` of a model whose loss is `function(y, p)` of the whole batch."""

    def build(config: Any, dataset: Any) -> keras.Model:
        def loss(y: Any, p: Any) -> Any:
            return function(keras.ops.reshape(y, (-1, 1)), p)

        return _compiled(loss)

    return build


root_of_mean = _of_batch(lambda y, p: keras.ops.sqrt(keras.ops.mean((y - p) ** 2)))
correlation = _of_batch(
    lambda y, p: -keras.ops.mean(_centred(y) * _centred(p)) / (keras.ops.std(p) + 1.0)
)
contrastive = _of_batch(
    lambda y, p: keras.ops.mean((keras.ops.matmul(p, keras.ops.transpose(y)) - 1.0) ** 2)
)
summed = _of_batch(lambda y, p: keras.ops.sum((y - p) ** 2) / 16.0)
largest = _of_batch(lambda y, p: keras.ops.max((y - p) ** 2))
normalised = _of_batch(lambda y, p: keras.ops.mean((y - p / keras.ops.norm(p)) ** 2))


class _OwnStep(keras.Model):
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
    def build(config: Any, dataset: Any) -> keras.Model:
        network = _network()
        model = type("OwnStep", (_OwnStep,), {"losses_of": staticmethod(function)})(
            network.inputs, network.outputs
        )
        model.compile(keras.optimizers.SGD(0.001))
        return model

    return build


# whose gradient a tape adds up over the rows of a replica
row_losses = _own(lambda y, p: (y - p)[:, 0] ** 2)
mean_losses = _own(lambda y, p: tf.reduce_mean((y - p) ** 2))
own_sum = _own(lambda y, p: tf.reduce_sum((y - p) ** 2))
own_noise = _own(
    lambda y, p: tf.reduce_mean((y - p) ** 2 * tf.random.uniform(tf.shape(y), dtype=y.dtype))
)
own_pairs = _own(
    lambda y, p: tf.reduce_mean((p - tf.transpose(p)) ** 2 * tf.abs(y - tf.transpose(y)))
)


def several_optimizers(config: Any, dataset: Any) -> keras.Model:
    """Has another optimizer for its hidden layer."""
    parts = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.01), {"hidden/.*": keras.optimizers.Adam(0.01)}
    )
    hidden = keras.layers.Dense(3, "tanh", name="hidden")
    return _compiled("mse", hidden, optimizer=keras.optimizers.MultiOptimizer(parts))


class Centred(keras.layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, values: Any) -> Any:
        return _centred(values)


def centred(config: Any, dataset: Any) -> keras.Model:
    return _compiled("mse", keras.layers.Dense(3), Centred())


def batch_norm(config: Any, dataset: Any, *, of_batch: bool = False) -> keras.Model:
    """Has batch norm and, if `of_batch`, a loss that is no mean over rows."""

    def loss(y: Any, p: Any) -> Any:
        return keras.ops.sqrt(keras.ops.mean((y - p) ** 2)) if of_batch else (y - p) ** 2

    return _compiled(loss, keras.layers.Dense(3), keras.layers.BatchNormalization())


class MeanIn32Bits(keras.metrics.Metric):
    """Adds up in float32 in any case, as many metrics of users do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        of_zeros = {"initializer": "zeros", "dtype": "float32"}
        self.total, self.rows = (
            self.add_weight(name=name, **of_zeros) for name in ("total", "rows")
        )

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        # sums of few numbers may be equal
        many = keras.ops.abs(p) * keras.ops.arange(1.0, 2.0, 0.01, dtype=p.dtype)
        self.total.assign_add(keras.ops.sum(keras.ops.cast(many, "float32")))
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(p)[0], "float32"))

    def result(self) -> Any:
        return self.total / self.rows


def metric_in_32_bits(config: Any, dataset: Any) -> keras.Model:
    return _compiled("mse", metrics=[MeanIn32Bits(name="mean")])


def last_layer_in_32_bits(config: Any, dataset: Any) -> keras.Model:
    """Has what Keras advises for mixed precision."""
    layers = [keras.layers.Dense(64, "tanh"), keras.layers.Dense(7, "softmax", dtype="float32")]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1, dtype="float32")])
    model.compile(keras.optimizers.AdamW(0.01, clipnorm=1.0), "mse")
    return model


def other_rows(config: Any) -> Any:
    x = _DRAWN.normal(size=(64, 4)).astype("float32")
    return x, x.sum(axis=1)


def other_weights(config: Any, dataset: Any) -> keras.Model:
    model = _compiled("mse")
    model.layers[0].bias.assign(_DRAWN.normal(size=3))
    return model


class _Annealed(keras.losses.Loss):
    """Has a term of the whole batch, whose weight `annealing` raises at the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.share = keras.Variable(0.0, trainable=False, name="share")

    def call(self, y: Any, p: Any) -> Any:
        return (keras.ops.reshape(y, (-1, 1)) - p) ** 2 + keras.ops.cast(
            self.share, p.dtype
        ) * keras.ops.var(p)


def annealed(config: Any, dataset: Any) -> keras.Model:
    return _compiled(_Annealed())


class Annealing(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.loss.share.assign(
            float(epoch >= 1) * np.sign(float(self.model.optimizer.learning_rate))
        )


def annealing() -> list[keras.callbacks.Callback]:
    return [Annealing()]


class _AddedLater(keras.layers.Layer):
    """Adds the variance of the whole batch to the loss once it has counted 20 steps."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(
            name="count", initializer="zeros", trainable=False, aggregation="only_first_replica"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.count.assign_add(1.0)
            self.add_loss(keras.ops.where(self.count > 20, keras.ops.var(x), 0.0))
        return x


def counted(config: Any, dataset: Any) -> keras.Model:
    return _compiled("mse", keras.layers.Dense(3, "tanh"), _AddedLater())


def drawn_later(config: Any, dataset: Any) -> keras.Model:
    """Adds numbers of TensorFlow's own state after 20 steps."""
    model = _network()

    def loss(y: Any, p: Any) -> Any:
        steps = tf.convert_to_tensor(model.optimizer.iterations)
        return (
            y
            - p
            + tf.cond(
                steps > 20, lambda: tf.random.normal(tf.shape(p), dtype=p.dtype), lambda: 0 * p
            )
        ) ** 2

    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def _pooled(loss: Any) -> keras.Model:
    layers = (
        keras.layers.Reshape((4, 1, 1, 1)),
        keras.layers.MaxPooling3D((2, 1, 1)),
        keras.layers.Flatten(),
    )
    return _compiled(loss, *layers)


def pooled(config: Any, dataset: Any) -> keras.Model:
    """Has a layer that TensorFlow does not compute in float64."""
    return _pooled("mse")


def pooled_root(config: Any, dataset: Any) -> keras.Model:
    return _pooled(
        lambda y, p: keras.ops.sqrt(keras.ops.mean((keras.ops.reshape(y, (-1, 1)) - p) ** 2))
    )


def infinite(config: Any, dataset: Any) -> keras.Model:
    """Its loss is NaN from the first step on."""
    return _compiled(lambda y, p: keras.ops.log(-keras.ops.mean(p**2)))


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
