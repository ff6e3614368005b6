"""Draws models by a seed, proves each by its graph, trains it on 1 and on 2 replicas, and counts what does not agree.

    python -m benchmarks.drawn_models                      # all 60, and 12 into which something is planted
    python -m benchmarks.drawn_models --first=0 --count=10 # some of them
    python -m benchmarks.drawn_models --steps=0            # proofs alone

The models are drawn from the lists below, of which each part gives on several replicas what it gives on one. Rows
have planted outliers, and half of the losses have a term that begins at step 200. Training is in float64, on two
logical CPUs.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.settings.request import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.invariance.internals import in_float64
from trainer.run.replica_check import proof_of
from trainer.run.training_setup import build_setup, set_precision_and_seed

SEED, MODELS, PLANTED_MODELS = 81, 60, 12
STEPS = 220
BEGINS = 200  # the step at which some terms of losses begin
TOLERANCE = 1e-6  # relative; rounding grows over the steps
_DRAWN = np.random.default_rng(SEED)
_OUTLIERS = np.where(np.arange(320) % 64 == 37, 30.0, 1.0)
_X = (_DRAWN.normal(size=(320, 8)) * _OUTLIERS[:, None]).astype("float32")
_IMAGES = (_DRAWN.normal(size=(320, 8, 8, 3)) * _OUTLIERS[:, None, None, None]).astype("float32")
_TOKENS = (_DRAWN.integers(0, 20, size=(320, 6)) * (np.arange(6) < _DRAWN.integers(1, 7, 320)[:, None])).astype("int32")
_Y = (_X[:, :1] > 0).astype("float32") + (_X[:, 1:2] > 0)
_WEIGHTS = _DRAWN.uniform(size=320).astype("float32")


@dataclass(frozen=True)
class Part:
    """Holds one entry of a list: how it is printed, and what it makes."""

    text: str
    make: Callable[[], Any]


def of(module: Any, name: str, *arguments: Any, **options: Any) -> Part:
    """Returns the part that calls a class of Keras with these arguments."""
    words = [*map(str, arguments), *(f"{key}={value}" for key, value in options.items())]
    return Part(f"{name}({', '.join(words)})", lambda: getattr(module, name)(*arguments, **options))


layer, optimizer, loss = (partial(of, module) for module in (keras.layers, keras.optimizers, keras.losses))


def wrapped(outer: str, inner: Part, **options: Any) -> Part:
    """Returns the part of a layer around another one."""
    return Part(f"{outer}({inner.text})", lambda: getattr(keras.layers, outer)(inner.make(), **options))


@keras.saving.register_keras_serializable("drawn")
class Attention(keras.layers.Layer):
    """Attends from each word to all words of its row."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.1)

    def call(self, x: Any, training: bool = False) -> Any:
        """Returns (rows, words, features)."""
        return x + self.attention(x, x, training=training)


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
        Part("Attention()", Attention),
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
        layer("UpSampling2D", 2, interpolation="bilinear"),
        layer("SpatialDropout2D", 0.1),
        layer("Permute", (2, 1, 3)),
        layer("RandomFlip"),
        layer("RandomTranslation", 0.1, 0.1),
        layer("RandomRotation", 0.1),
        layer("RandomZoom", 0.1),
        layer("RandomContrast", 0.2),
        layer("RandomBrightness", 0.1, value_range=(0, 1)),
        layer("Resizing", 6, 6),
        wrapped("SpectralNormalization", layer("Conv2D", 4, 3, padding="same")),
    ],
}
OPTIMIZERS = [
    *(optimizer(name, 1e-3) for name in ("SGD", "Adam", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Ftrl")),
    optimizer("SGD", 1e-3, momentum=0.9, nesterov=True, weight_decay=1e-3),
    optimizer("Adam", 1e-3, clipnorm=1.0),
    optimizer("AdamW", 1e-3, global_clipnorm=1.0, use_ema=True),
    optimizer("Adam", 1e-3, clipvalue=0.5, amsgrad=True),
    optimizer("Lamb", 1e-3),
    optimizer("Adafactor", 1e-3),
    optimizer("RMSprop", 1e-3, centered=True, momentum=0.5),
    Part("Adam(CosineDecay)", lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-3, 100))),
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
_CLASSES = [loss("SparseCategoricalCrossentropy", from_logits=True), loss("SparseCategoricalCrossentropy")]
STEPS_OF_USERS = ["fit's", "own", "two passes", "adversarial", "gradient penalty", "teacher"]
PRECISIONS = ["float32", "mixed_bfloat16", "mixed_float16", "float64"]
BEGUN = ["nothing", "squares of each row"]
PLANTED = ["a sum over rows", "the largest row", "rows above the mean"]


@dataclass(frozen=True)
class Drawn:
    """Holds what one model is made of."""

    kind: str  # of its rows
    weighted: bool
    layers: list[Part]
    last: Part
    loss: Part
    optimizer: Part
    step: str
    precision: str
    begun: str  # what its loss has from step 200 on

    def __str__(self) -> str:
        """Returns one line."""
        layers = ", ".join(part.text for part in (*self.layers, self.last))
        weights = " with weights" if self.weighted else ""
        return (
            f"{self.kind}{weights} · {layers} · {self.loss.text} · {self.optimizer.text} · step: {self.step} · "
            f"{self.precision} · from step {BEGINS}: {self.begun}"
        )


def drawn(number: int) -> Drawn:
    """Returns a model's parts; into those from MODELS on something is planted that mixes rows."""
    draw = np.random.default_rng([SEED, number])

    def one(of: list[Any]) -> Any:
        return of[int(draw.integers(len(of)))]

    kind = one(["table", "tokens", "images"])
    pooled = {
        "table": [layer("Flatten")],
        "tokens": [layer("GlobalAveragePooling1D"), layer("GlobalMaxPooling1D"), layer("LSTM", 6), layer("Flatten")],
        "images": [layer("GlobalAveragePooling2D"), layer("GlobalMaxPooling2D"), layer("Flatten")],
    }
    parts = Drawn(
        kind=kind,
        weighted=bool(draw.random() < 0.25),
        layers=[one(LAYERS[kind]) for _ in range(4)],
        last=one(pooled[kind]),
        loss=one([*_NUMBERS, *_CLASSES * 2]),
        optimizer=one(OPTIMIZERS),
        step=one(STEPS_OF_USERS[:3] if kind == "tokens" else STEPS_OF_USERS),
        precision=one(PRECISIONS),
        begun=one(BEGUN if number < MODELS else PLANTED),
    )
    # Keras adds the losses of activities to others of its own dtype alone.
    of_activities = any("ctivity" in part.text.lower() for part in parts.layers)
    return replace(parts, precision="float32") if of_activities else parts


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
                value += 0.1 * tf.cast(tf.reduce_mean((p - self(x, training=True)) ** 2), value.dtype)
            if self.kind == "gradient penalty":
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    total = tf.reduce_sum(self(x, training=False))
                slopes = tf.reshape(inner.gradient(total, x), (tf.shape(x)[0], -1))
                value += 0.1 * tf.cast(tf.reduce_mean(tf.reduce_sum(slopes**2, 1)), value.dtype)
            if self.kind == "teacher":
                value += 1e-3 * tf.cast(tf.reduce_mean(p * tf.cast(self.teacher, p.dtype)), value.dtype)
        gradients = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        if self.kind == "teacher":
            self.teacher.assign(0.9 * self.teacher + 0.1 * tf.cast(self.trainable_variables[-1], self.teacher.dtype))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(value)
            else:
                metric.update_state(y, p, sample_weight=weight)
        return {metric.name: metric.result() for metric in self.metrics}


def _loss(parts: Drawn, optimizer: Any) -> Any:
    """Returns the loss of each row, with what begins at step BEGINS."""
    base = parts.loss.make()

    def of_rows(y: Any, p: Any) -> Any:
        begun = tf.cast(tf.convert_to_tensor(optimizer.iterations) >= BEGINS, p.dtype)
        extra: dict[str, Callable[[], Any]] = {
            "nothing": lambda: 0.0,
            "squares of each row": lambda: 1e-3 * tf.reduce_mean(p**2, -1),
            "a sum over rows": lambda: 1e-4 * tf.reduce_sum(p**2),
            "the largest row": lambda: 1e-2 * tf.nn.relu(tf.reduce_max(p) - 1.0),
            "rows above the mean": lambda: 1e-2 * tf.reduce_mean(tf.nn.relu(p - tf.reduce_mean(p, 0)), -1),
        }
        return base.call(y, p) + begun * extra[parts.begun]()

    return of_rows


def model(config: TrainConfig, dataset: Any, *, number: int = 0) -> keras.Model:
    """Returns the compiled model of a number."""
    parts = drawn(number)
    shape, dtype = {"table": ((8,), None), "tokens": ((6,), "int32"), "images": ((8, 8, 3), None)}[parts.kind]
    inputs = x = keras.Input(shape, dtype=dtype)
    if parts.kind == "tokens":
        x = keras.layers.Embedding(20, 8, mask_zero=number % 2 == 0)(x)
    for part in parts.layers:
        try:
            x = part.make()(x)
        except ValueError:  # such as a second RepeatVector, which takes a vector
            continue
    x = parts.last.make()(x)
    classes = parts.loss.text.startswith("Sparse")
    activation = {"SparseCategoricalCrossentropy()": "softmax", "Poisson()": "softplus"}.get(parts.loss.text)
    outputs = keras.layers.Dense(3 if classes else 1, activation, dtype="float32" if number % 3 else None)(x)
    made: Any = (keras.Model if parts.step == "fit's" else Stepping)(inputs, outputs)
    if parts.step != "fit's":
        made.kind = parts.step
        made.teacher = made.add_weight(shape=outputs.shape[1:], initializer="zeros", trainable=False, name="teacher")
    optimizer = parts.optimizer.make()
    made.compile(
        optimizer, _loss(parts, optimizer), metrics=["mae"] if not classes else ["sparse_categorical_accuracy"]
    )
    return made


def rows(config: TrainConfig, x: Any, *, weighted: bool) -> Any:
    """Returns what fit takes."""
    return (x, _Y, _WEIGHTS) if weighted else (x, _Y)


table, tokens, images = (partial(rows, x=x, weighted=False) for x in (_X, _TOKENS, _IMAGES))
weighted_table, weighted_tokens, weighted_images = (partial(rows, x=x, weighted=True) for x in (_X, _TOKENS, _IMAGES))


def config_of(number: int) -> TrainConfig:
    """Returns the settings of a run of a model."""
    parts = drawn(number)
    data = f"{'weighted_' if parts.weighted else ''}{parts.kind}"
    flags = [f"--{key}=benchmarks.drawn_models:{name}" for key, name in (("model", "model"), ("data", data))]
    flags += [f"--number={number}", "--global_batch_size=16", f"--precision={parts.precision}", "--steps=1"]
    return resolve(flags).config


def trained(config: TrainConfig, replicas: int, steps: int, *, noise: float = 0.0) -> list[Any]:
    """Returns the weights after so many steps on so many replicas; noise: added to the first weights."""
    config = replace(config, replicas=replicas, jit_compile="false")
    set_precision_and_seed(config)
    with in_float64() if config.precision == "float64" else nullcontext():
        setup = build_setup(config, make_replicas(config))
    draw = np.random.default_rng(SEED)
    for weight in setup.model.trainable_variables if noise else []:
        weight.assign_add(noise * draw.normal(size=weight.shape))
    with setup.dataset.reading():
        setup.step_runner()(setup.rows_from(0), 0, steps)
    return [np.asarray(weight) for weight in setup.model.get_weights()]


def difference(config: TrainConfig, steps: int) -> float:
    """Returns the largest relative difference of a weight tensor after steps on one and on two replicas.

    In float32 if a layer of Keras's has no float64. It is 0 if rounding of the first weights differs as much.
    """
    config, noise = replace(config, precision="float64"), 1e-16
    try:
        alone = trained(config, 1, steps)
    except (TypeError, UserError):  # RandomRotation and RandomZoom compute in float32 in any case
        config, noise = replace(config, precision="float32"), 1e-7
        alone = trained(config, 1, steps)
    found = _largest(alone, trained(config, 2, steps))
    rounded = found > TOLERANCE and found < 100 * _largest(alone, trained(config, 1, steps, noise=noise))
    return 0.0 if rounded else found


def _largest(first: list[Any], second: list[Any]) -> float:
    return max(
        float(np.linalg.norm(one - other) / max(np.linalg.norm(one), 1e-3 * np.sqrt(one.size)))
        for one, other in zip(first, second, strict=True)
    )


def main() -> None:
    """Prints a line a model and the counts."""
    parser = argparse.ArgumentParser()
    for name, default in (("first", 0), ("count", MODELS + PLANTED_MODELS), ("steps", STEPS)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    counts = dict.fromkeys(("proved", "proved but different", "refused though right", "told though right"), 0)
    for number in range(given.first, given.first + given.count):
        began, config = time.monotonic(), config_of(number)
        proof = proof_of(config)
        seconds = time.monotonic() - began
        differs = difference(config, given.steps) if given.steps else 0.0
        right = number < MODELS
        counts["proved"] += right and proof.holds
        counts["proved but different"] += proof.holds and (not right or not differs <= TOLERANCE)
        counts["refused though right"] += right and bool(proof.mixes) and differs > TOLERANCE
        counts["told though right"] += right and bool(proof.mixes) and differs <= TOLERANCE
        told = "; ".join([*proof.mixes, *proof.unknown])
        print(f"{number} · {proof.verdict()} in {seconds:.1f} s · {differs:.1e} · {drawn(number)} · {told}", flush=True)
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
