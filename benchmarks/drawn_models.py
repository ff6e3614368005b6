"""Draws scripts that call `fit` by a seed, runs each by Keras and by this package, and counts what
does not agree.

    python -m benchmarks.drawn_models                       # all 130, and 12 that mix rows
    python -m benchmarks.drawn_models --first=0 --count=10  # some of them

The first 100 draw nothing at random, so that plain `fit` on one device, a run on one replica and
one on two have the same weights, history and answers in float64. The next 30 have such layers too:
one replica and two agree. Before it trains on two replicas the graph of each proves that; in the
last 12 something mixes rows, which must not be proved. Rows have planted outliers, and some losses
have a term that begins at step 30.
"""

import argparse
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import tensorflow as tf

from tests.user_callbacks import WarmUp
from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.invariance.internals import reset_layer_names
from trainer.measures.keras_calls import answered_by_replicas
from trainer.run import training_run
from trainer.run.launched import Launch
from trainer.run.start import StartedJob

SEED = 81
ALIKE = 100
MODELS = 130
PLANTED_MODELS = 12
EPOCHS = 4
BEGINS = 30  # the step at which some terms of losses begin
TOLERANCE = 1e-6  # relative; rounding grows over the steps
ROWS = 320
HELD_OUT = 37
_DRAWN = np.random.default_rng(SEED)
_OUTLIERS = np.where(np.arange(ROWS + HELD_OUT) % 64 == 37, 30.0, 1.0)


def _normal(*shape: int) -> Any:
    rows = _DRAWN.normal(size=(ROWS + HELD_OUT, *shape))
    return rows * _OUTLIERS.reshape(-1, *[1] * len(shape))


X: dict[str, Any] = {
    "table": _normal(8),
    "images": _normal(8, 8, 3),
    "tokens": _DRAWN.integers(0, 20, size=(ROWS + HELD_OUT, 6), dtype=np.int32),
}
Y = (X["table"][:, :1] > 0) + 1.0 * (X["table"][:, 1:2] > 0)
WEIGHTS = _DRAWN.uniform(size=ROWS)
_AT_RANDOM = ("dropout", "noise", "random")
Found = dict[str, Any]  # weights, and the history of each value


@dataclass(frozen=True)
class Part:
    """Holds one entry of a list: how it is printed, and what it makes."""

    text: str
    make: Callable[[], Any]

    def __repr__(self) -> str:
        return self.text


def of(module: Any, name: str, *arguments: Any, **options: Any) -> Part:
    """Returns the part that calls a class of Keras with these arguments."""
    words = [*map(str, arguments), *(f"{key}={value}" for key, value in options.items())]
    return Part(f"{name}({', '.join(words)})", lambda: getattr(module, name)(*arguments, **options))


layer, optimizer, loss = (
    partial(of, module) for module in (keras.layers, keras.optimizers, keras.losses)
)


def wrapped(outer: str, inner: Part, **options: Any) -> Part:
    """Returns the part of a layer around another one."""
    return Part(
        f"{outer}({inner.text})", lambda: getattr(keras.layers, outer)(inner.make(), **options)
    )


def attention(x: Any) -> Any:
    """Returns what each word attends to in its row, beside the word."""
    return x + keras.layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)


_ANY = [
    *(
        layer("Activation", name)
        for name in ("relu", "gelu", "selu", "swish", "mish", "softmax", "log_softmax", "tanh")
    ),
    layer("LeakyReLU"),
    layer("PReLU"),
    layer("ELU"),
    layer("Dropout", 0.2),
    layer("GaussianDropout", 0.1),
    layer("GaussianNoise", 0.1),
    layer("AlphaDropout", 0.1),
    layer("LayerNormalization"),
    layer("RMSNormalization"),
    layer("BatchNormalization"),
    layer("UnitNormalization"),
    layer("ActivityRegularization", 1e-3),
    layer("Rescaling", 0.5),
    layer("GroupNormalization", 2),
]
LAYERS: dict[str, list[Part]] = {
    "table": [
        *_ANY,
        *(
            layer("Dense", 8, name, kernel_regularizer="l2")
            for name in ("relu", "elu", "softplus", "sigmoid", "softsign")
        ),
        layer("Dense", 6, activity_regularizer="l1", kernel_constraint="max_norm"),
        layer("EinsumDense", "ab,bc->ac", output_shape=8),
        wrapped("SpectralNormalization", layer("Dense", 8)),
        layer("RepeatVector", 3),
        layer("Reshape", (2, -1)),
    ],
    "tokens": [
        *_ANY,
        *(layer(name, 8, return_sequences=True) for name in ("LSTM", "GRU", "SimpleRNN")),
        wrapped("Bidirectional", layer("LSTM", 4, return_sequences=True, dropout=0.1)),
        Part("attention, dropout", lambda: attention),
        layer("Conv1D", 8, 3, padding="same"),
        layer("SeparableConv1D", 8, 2, padding="causal"),
        wrapped("TimeDistributed", layer("Dense", 8, "relu")),
        layer("SpatialDropout1D", 0.1),
        layer("MaxPooling1D", 2, 1, padding="same"),
        layer("UpSampling1D", 2),
        layer("ZeroPadding1D", 1),
    ],
    "images": [
        *_ANY,
        layer("Conv2D", 8, 3, padding="same"),
        layer("Conv2D", 8, 3, strides=2, padding="same"),
        layer("DepthwiseConv2D", 3, padding="same"),
        layer("SeparableConv2D", 8, 3, padding="same"),
        layer("Conv2DTranspose", 6, 3, padding="same"),
        layer("MaxPooling2D", 2, padding="same"),
        layer("AveragePooling2D", 2, padding="same"),
        layer("UpSampling2D", 2),
        layer("ZeroPadding2D", 1),
        layer("SpatialDropout2D", 0.1),
        layer("RandomFlip"),
        layer("RandomTranslation", 0.1, 0.1),
        layer("RandomContrast", 0.2),
        layer("RandomBrightness", 0.1, value_range=(0, 1)),
        layer("Resizing", 6, 6),
        wrapped("SpectralNormalization", layer("Conv2D", 4, 3, padding="same")),
    ],
}
OPTIMIZERS = [
    *(
        optimizer(name, 1e-3)
        for name in ("SGD", "Adam", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Ftrl")
    ),
    optimizer("SGD", 1e-3, momentum=0.9, nesterov=True, weight_decay=1e-3),
    optimizer("Adam", 1e-3, clipnorm=1.0),
    optimizer("AdamW", 1e-3, global_clipnorm=1.0, use_ema=True),
    optimizer("Adam", 1e-3, clipvalue=0.5, amsgrad=True),
    optimizer("Lamb", 1e-3),
    optimizer("Adafactor", 1e-3),
    optimizer("RMSprop", 1e-3, centered=True, momentum=0.5),
    Part(
        "Adam(CosineDecay)",
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-3, 100)),
    ),
]
_NUMBERS = [
    loss("Dice", axis=-1),
    *(
        loss(name)
        for name in (
            "MeanSquaredError",
            "MeanAbsoluteError",
            "Huber",
            "LogCosh",
            "MeanSquaredLogarithmicError",
            "MeanAbsolutePercentageError",
            "Poisson",
            "CosineSimilarity",
        )
    ),
]
_CLASSES = [
    loss("SparseCategoricalCrossentropy", from_logits=True),
    loss("SparseCategoricalCrossentropy"),
]
METRICS = {
    False: ["mae", "mse", "RootMeanSquaredError"],
    True: ["accuracy", "sparse_categorical_crossentropy"],
}
STEPS_OF_USERS = ["fit's", "own", "on the object", "two passes", "adversarial", "gradient penalty"]
DATA = ["classes with weights", "arrays", "weighted arrays", "a dictionary", "tf.data"]
RATES = [
    Part("ReduceLROnPlateau", lambda: keras.callbacks.ReduceLROnPlateau("loss", patience=1)),
    Part(
        "LearningRateScheduler",
        lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate),
    ),
    Part("WarmUp", WarmUp),
]
CALLBACKS = [
    *RATES,
    Part(
        "EarlyStopping",
        lambda: keras.callbacks.EarlyStopping("loss", 0.01, 1, restore_best_weights=True),
    ),
    Part("Answers", lambda: Answers()),
]
# Of the launcher, and of fit: with batches of 24 the last one of a pass is smaller.
FLAGS: list[dict[str, Any]] = [
    {},
    {"steps_per_loop": 3},
    {"report_every_steps": 1},
    {"checkpoint_every_steps": 7},
]
OF_FIT: list[dict[str, Any]] = [{}, {"validation_freq": 3}, {"initial_epoch": 1}]
BEGUN = ["nothing", "squares of each row"]
PLANTED = ["a sum over rows", "the largest row"]


class Answers(keras.callbacks.Callback):
    """Evaluates and predicts held-out rows, and adds what it finds to the history."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the values of an epoch."""
        x, y = self.rows
        found = self.model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)
        answers = self.model.predict(x, batch_size=10, verbose=0)
        logs.update(
            {f"again_{name}": value for name, value in found.items()}, answers=float(answers.sum())
        )


def drawn(number: int) -> Any:
    """Returns a script's parts by name: below ALIKE none draws at random; from MODELS on something
    mixes rows."""
    draw = np.random.default_rng([SEED, number])

    def one(of: Sequence[Any]) -> Any:
        return of[int(draw.integers(len(of)))]

    kind = one([*LAYERS])
    pooled = {
        "table": [layer("Flatten")],
        "tokens": [
            layer("GlobalAveragePooling1D"),
            layer("GlobalMaxPooling1D"),
            layer("LSTM", 6),
            layer("Flatten"),
        ],
        "images": [layer("GlobalAveragePooling2D"), layer("GlobalMaxPooling2D"), layer("Flatten")],
    }
    layers = LAYERS[kind]
    optimizers = OPTIMIZERS
    if number < ALIKE:
        layers = [
            part for part in layers if not any(word in part.text.lower() for word in _AT_RANDOM)
        ]
        if kind == "tokens":  # gradients of a repeated token are added before they are squared
            optimizers = [part for part in optimizers if part.text.startswith("SGD")]
    loss = one([*_NUMBERS, *_CLASSES * 2])
    classes = loss in _CLASSES
    data = one(DATA if classes else DATA[1:])
    steps = STEPS_OF_USERS[:4] if kind == "tokens" or data == "a dictionary" else STEPS_OF_USERS
    step = one(steps) if draw.random() < 0.5 else "fit's"
    callback = one(CALLBACKS)
    return SimpleNamespace(
        kind=kind,
        layers=[one(layers) for _ in range(4)],
        last=one(pooled[kind]),
        loss=loss,
        classes=classes,
        # no callback sets the rate of a schedule
        optimizer=one(optimizers[:-1] if callback in RATES else optimizers),
        step=step,
        own=one(["nothing", "compute_loss", "compute_metrics"]) if step == "fit's" else "",
        metrics={
            one(["metrics", "weighted_metrics"]): [
                one(METRICS[classes]) for _ in range(int(draw.integers(3)))
            ]
        },
        data=data,
        batch_size=one([16, 24]),
        of_fit=one(OF_FIT),
        callback=callback,
        flags=one(FLAGS),
        begun=one(BEGUN if number < MODELS else PLANTED),
    )


class Stepping(keras.Model):
    """Trains as users' own steps do."""

    kind = "own"

    def train_step(self, data: Any) -> dict[str, Any]:
        """Returns the metrics of one step."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        if self.kind == "adversarial":
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = self.compute_loss(x, y, self(x, training=True), weight)
            x = x + 0.01 * tf.sign(tape.gradient(value, x))
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            value = self.compute_loss(x, y, p, weight)
            if self.kind == "two passes":
                value += 0.1 * tf.cast(
                    tf.reduce_mean((p - self(x, training=True)) ** 2), value.dtype
                )
            if self.kind == "gradient penalty":
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    total = tf.reduce_sum(self(x, training=False))
                slopes = tf.reshape(inner.gradient(total, x), (tf.shape(x)[0], -1))
                value += 0.1 * tf.cast(tf.reduce_mean(tf.reduce_sum(slopes**2, 1)), value.dtype)
        gradients = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(value)
            else:
                metric.update_state(y, p, sample_weight=weight)
        return {metric.name: metric.result() for metric in self.metrics}


class Penalized(keras.Model):
    """Adds a penalty to the loss, with a weight that falls whenever metrics are reset."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.weight = self.add_weight(shape=(), initializer="ones", trainable=False, name="weight")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        """Returns the loss of a batch."""
        value = super().compute_loss(x, y, y_pred, sample_weight)
        return value + tf.cast(self.weight, value.dtype) * tf.cast(
            tf.reduce_mean(y_pred**2), value.dtype
        )

    def reset_metrics(self) -> None:
        """Begins an epoch or an evaluation."""
        super().reset_metrics()
        self.weight.assign(0.9 * self.weight)


class Renamed(keras.Model):
    """Gives metrics other names."""

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        """Returns the metrics of a batch."""
        return {
            f"my_{name}": value
            for name, value in super().compute_metrics(x, y, y_pred, sample_weight).items()
        }


def _loss(parts: Any, optimizer: Any) -> Any:
    """Returns the loss of each row, with what begins at step BEGINS."""
    base = parts.loss.make()

    def of_rows(y: Any, p: Any) -> Any:
        begun = tf.cast(tf.convert_to_tensor(optimizer.iterations) >= BEGINS, p.dtype)
        extra: dict[str, Callable[[], Any]] = {
            "nothing": lambda: 0.0,
            "squares of each row": lambda: 1e-3 * tf.reduce_mean(p**2, -1),
            "a sum over rows": lambda: 1e-4 * tf.reduce_sum(p**2),
            "the largest row": lambda: 1e-2 * tf.nn.relu(tf.reduce_max(p) - 1.0),
        }
        return base.call(y, p) + begun * extra[parts.begun]()

    return of_rows


def built(parts: Any) -> keras.Model:
    """Returns the compiled model of a script."""
    inputs = x = keras.Input(X[parts.kind].shape[1:], name="x")
    if parts.kind == "tokens":
        x = keras.layers.Embedding(20, 8, mask_zero=parts.batch_size == 16)(x)
    for part in parts.layers:
        try:
            x = part.make()(x)
        except ValueError:  # such as a second RepeatVector, which takes a vector
            continue
    x = parts.last.make()(x)
    activation = {"SparseCategoricalCrossentropy()": "softmax", "Poisson()": "softplus"}.get(
        parts.loss.text
    )
    outputs = keras.layers.Dense(
        3 if parts.classes else 1, activation, dtype=keras.config.floatx()
    )(x)
    plain = {"fit's": keras.Model, "on the object": keras.Model}.get(parts.step, Stepping)
    kind = {"compute_loss": Penalized, "compute_metrics": Renamed}.get(parts.own, plain)
    model = kind({"x": inputs} if parts.data == "a dictionary" else inputs, outputs)
    model.kind = parts.step
    if parts.step == "on the object":
        model.train_step = partial(Stepping.train_step, model)
    optimizer = parts.optimizer.make()
    model.compile(optimizer, _loss(parts, optimizer), **parts.metrics)
    return model


def fitted(parts: Any, epochs: int, noise: float = 0.0) -> Found:
    """Runs a script; returns its weights and its history. noise: added to the first weights."""
    keras.utils.set_random_seed(SEED)
    reset_layer_names()  # by which layers draw, as in a process of its own
    model = built(parts)
    draw = np.random.default_rng(SEED)
    for weight in model.trainable_variables if noise else []:
        weight.assign_add(noise * draw.normal(size=weight.shape))
    x = X[parts.kind] if parts.kind == "tokens" else X[parts.kind].astype(keras.config.floatx())
    y = Y.astype(keras.config.floatx())
    named = (lambda rows: {"x": rows}) if parts.data == "a dictionary" else np.asarray
    train: tuple[Any, ...] = (named(x[:ROWS]), y[:ROWS])
    held_out = (named(x[ROWS:]), y[ROWS:])
    of_fit = {"batch_size": parts.batch_size, **parts.of_fit}
    if parts.data == "weighted arrays":
        of_fit["sample_weight"] = WEIGHTS
    if parts.data == "classes with weights":
        of_fit["class_weight"] = {0: 1.0, 1: 2.0, 2: 0.5}
    if parts.data == "tf.data":
        train = (tf.data.Dataset.from_tensor_slices(train).batch(of_fit.pop("batch_size")),)
    callback = parts.callback.make()
    callback.rows = held_out
    history = model.fit(
        *train,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=held_out,
        validation_batch_size=16,
        callbacks=[callback],
        **of_fit,
    ).history
    return found_in(model, history)


def found_in(model: keras.Model, history: dict[str, Any]) -> Found:
    """Returns the weights and the history after a call of `fit`."""
    weights = {f"weight {number}": weight for number, weight in enumerate(model.get_weights())}
    return {name: np.asarray(values) for name, values in {**weights, **history}.items()}


def launched(run: Callable[[], Any], replicas: int, **flags: Any) -> tuple[Any, str]:
    """Returns what a script returns if its `fit` is this package's, and what is proved of its
    steps."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            model="drawn.py",
            data="drawn.py",
            job_dir=folder,
            replicas=replicas,
            global_batch_size=replicas,
            jit_compile="false",
            tensorboard=False,
            allow_replica_dependence=True,
            **flags,
        )
        job = StartedJob.open(config, ["drawn.py"], time.monotonic())
        devices = job.connect()
        launch = Launch(job, devices)
        # which takes half of the time of a short script
        unrehearsed = patch.object(training_run, "rehearse")
        with unrehearsed, answered_by_replicas(devices, fit=launch.fit), devices.strategy.scope():
            return run(), job.result.replica_checks.get("all", "")


def difference(one: Found, other: Found) -> float:
    """Returns the largest relative difference of a weight tensor or of the history of a value."""
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        return np.inf
    norms = {
        name: max(np.linalg.norm(array), 1e-3 * np.sqrt(array.size)) for name, array in one.items()
    }
    return max(
        float(np.linalg.norm(one[name] - other[name]) / norm) for name, norm in norms.items()
    )


def compared(number: int, epochs: int) -> tuple[float, str]:
    """Returns the largest difference between ways to run a script, and what is proved of its steps.

    It is 0 if rounding of the first weights differs as much.
    """
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    parts = drawn(number)
    run = partial(fitted, parts, epochs)
    (alone, _), (together, verdict) = (
        launched(run, replicas, **parts.flags) for replicas in (1, 2)
    )
    found = difference(alone, together)
    if number < ALIKE:
        found = max(found, difference(run(), alone))
    if found > TOLERANCE and found < 100 * difference(run(), run(noise=1e-16)):
        found = 0.0
    return found, verdict


def main() -> None:
    """Prints a line a script and the counts."""
    parser = argparse.ArgumentParser()
    for name, default in (("first", 0), ("count", MODELS + PLANTED_MODELS)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    tf.get_logger().setLevel("ERROR")
    warnings.simplefilter("ignore")
    counts = Counter[str]()
    for number in range(given.first, given.first + given.count):
        began = time.monotonic()
        planted = number >= MODELS
        try:
            differs, verdict = compared(number, 1 if planted else EPOCHS)
        except UserError as error:
            differs = np.inf
            verdict = f"refused: {error}"
        same = "planted" if planted else "as fit" if differs <= TOLERANCE else "different"
        counts[f"{same}, {verdict.partition(':')[0]}"] += 1
        seconds = time.monotonic() - began
        print(
            f"{number} · {same} {differs:.1e} · {verdict} · {seconds:.0f} s ·"
            f" {vars(drawn(number))}",
            flush=True,
        )
    print("; ".join(f"{name}: {count}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
