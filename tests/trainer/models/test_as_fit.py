"""What a model and its compile() may change of `fit`: docs/training.md has the table, and each row
is run here."""

import random
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import Input, Model, layers, losses, metrics, ops, optimizers
from keras.callbacks import Callback
from keras.utils import set_random_seed
from numpy.random import default_rng

from benchmarks.drawn_models import Penalized, difference, found_in, launched
from tests.fixtures import SLOW, Log, Patch, parametrize
from tests.support import refused

PAGE = Path(__file__).parents[3] / "docs" / "training.md"
# the last batch of an epoch has four rows
ROWS = 44
BATCH = 8
EPOCHS = 2
_DRAW = default_rng(0)
X = _DRAW.normal(size=(ROWS, 4))
Y = X.sum(1, keepdims=True) + 0.5
WEIGHTS = _DRAW.uniform(0.5, 2.0, ROWS)


def network(
    kind: type[Model] = Model,
    loss: Any = "mse",
    optimizer: Any = None,
    outputs: int = 1,
    **compiled: Any,
) -> Any:
    x = Input((4,))
    hidden = layers.Dense(6, "tanh")(x)
    heads = [layers.Dense(1, name=f"head{number}")(hidden) for number in range(outputs)]
    model = kind(x, heads if outputs > 1 else heads[0])
    model.compile(optimizer or optimizers.SGD(1e-2), loss, **compiled)
    return model


class OwnStep(Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = 3 * self.compute_loss(x, y, p, weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, p, weight)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = data
        return self.compute_metrics(x, y, 2 * self(x, training=False), weight)


class Renamed(Model):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.gap = metrics.Mean(name="gap")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.1 * ops.mean(ops.abs(y_pred))

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        self.gap.update_state(ops.abs(y - y_pred))
        return {
            f"my_{name}": value
            for name, value in super().compute_metrics(x, y, y_pred, sample_weight).items()
        }

    def get_metrics_result(self) -> dict[str, Any]:
        return {
            name: value for name, value in super().get_metrics_result().items() if name != "mse"
        }


class Derived(Model):
    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return results | {"root": ops.sqrt(results["loss"])}


class HalfReset(Model):
    def reset_metrics(self) -> None:
        self.metrics[0].reset_state()


class OwnFunction(Model):
    def make_train_function(self, force: bool = False) -> None:
        super().make_train_function(force)


class OwnCalls(Model):
    def evaluate(self, *given: Any, **named: Any) -> Any:
        return super().evaluate(*given, **named)


class Signs(optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * ops.sign(gradient))


class Moments(layers.BatchNormalization):
    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        return 0.5 * mean, variance + 1.0


def on_the_object() -> Any:
    model = network(metrics=["mae"])
    model.train_step = MethodType(OwnStep.train_step, model)
    return model


def own_parts() -> Any:
    x = Input((4,))
    model = Model(x, layers.Dense(1)(Moments()(layers.Dense(6)(x))))
    model.compile(
        Signs(1e-2), lambda y, p: ops.abs(y - p) ** 3, metrics=[lambda y, p: ops.abs(y - p)]
    )
    return model


class OfBatches(Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...


MSE = losses.MeanSquaredError
LOSSES = (
    "`loss_weights`, `weighted_metrics`, every `reduction` of a loss, `auto_scale_loss`, settings"
    " of optimizers"
)
METHODS = (
    "your own `train_step`, `test_step`, `compute_loss`, `compute_metrics`, `get_metrics_result`,"
    " also on the object"
)
REFUSED = (
    "`run_eagerly=True`; your own `make_train_function`, `make_test_function`,"
    " `make_predict_function`"
)
ONE_ALONE = "`gradient_accumulation_steps`, `ema_overwrite_frequency` of an optimizer"
AS_FIT = "as in `fit`"
# The row of the page, what it says, the model, and the line that is logged or with which it is
# refused.
CASES: list[tuple[str, str, Callable[[], Any], str]] = [
    (
        LOSSES,
        AS_FIT,
        lambda: network(
            outputs=2,
            loss=["mse", "mae"],
            loss_weights=[0.3, 2.0],
            metrics=[["mae"], []],
            weighted_metrics=[[], ["mse"]],
        ),
        "",
    ),
    *(
        (
            LOSSES,
            AS_FIT,
            lambda reduction=reduction: network(
                loss=MSE(reduction=reduction), weighted_metrics=["mae"]
            ),
            "",
        )
        for reduction in (None, "sum", "mean_with_sample_weight")
    ),
    (
        LOSSES,
        AS_FIT,
        lambda: network(
            optimizer=optimizers.LossScaleOptimizer(
                optimizers.Adam(1e-2, clipnorm=0.5, use_ema=True, weight_decay=1e-3)
            ),
            loss_weights=0.1,
        ),
        "",
    ),
    (METHODS, AS_FIT, lambda: network(OwnStep, metrics=["mae"]), ""),
    (METHODS, AS_FIT, on_the_object, ""),
    (METHODS, AS_FIT, lambda: network(Renamed, metrics=["mae", "mse"]), ""),
    ("your own layers, losses, metrics and optimizers", AS_FIT, own_parts, ""),
    (
        "values of `train_step`, `test_step` or `compute_metrics` that are no metrics",
        "an epoch has their mean, in `fit` the last batch's value: a line says so",
        lambda: network(Derived),
        "root: no metric of the model",
    ),
    (
        "`steps_per_execution`",
        "as in `fit`, but callbacks of single batches run after every step: a line says so",
        lambda: network(steps_per_execution=4),
        "OfBatches: `fit` would run after 4 steps",
    ),
    ("`jit_compile`", "`--jit_compile` decides", lambda: network(jit_compile=False), ""),
    (
        "your own `reset_metrics`",
        "as in `fit`; refused if it leaves out a metric",
        lambda: network(Penalized),
        "",
    ),
    (
        "your own `reset_metrics`",
        "as in `fit`; refused if it leaves out a metric",
        lambda: network(HalfReset, metrics=["mae"]),
        "reset_metrics of HalfReset leaves out compile_metrics",
    ),
    (
        ONE_ALONE,
        "refused on several replicas",
        lambda: network(optimizer=optimizers.SGD(1e-2, gradient_accumulation_steps=2)),
        "gradient_accumulation_steps=2",
    ),
    (REFUSED, "refused", lambda: network(run_eagerly=True), "it runs eagerly"),
    (REFUSED, "refused", lambda: network(OwnFunction), "it has a make_train_function of its own"),
    (
        "your own `fit`, `evaluate`",
        "not called by a run: a line says so",
        lambda: network(OwnCalls),
        "its own evaluate is not called",
    ),
    *(
        (
            LOSSES,
            AS_FIT,
            lambda clipped=clipped: network(optimizer=optimizers.SGD(1e-2, **clipped)),
            "",
        )
        for clipped in ({"global_clipnorm": 0.1}, {"clipvalue": 0.05})
    ),
    (
        ONE_ALONE,
        "refused on several replicas",
        lambda: network(optimizer=optimizers.SGD(1e-2, use_ema=True, ema_overwrite_frequency=2)),
        "ema_overwrite_frequency=2",
    ),
]
QUICK = (5, 7, 13, 14, 15, 16)


def trained(build: Callable[[], Any], policy: str = "float64") -> Any:
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)
    set_random_seed(1)
    model = build()
    y, weights = (
        (Y, WEIGHTS) if len(model.outputs) == 1 else ((Y, Y**2), (WEIGHTS, WEIGHTS[::-1].copy()))
    )
    history = model.fit(
        X,
        y,
        BATCH,
        EPOCHS,
        0,
        [OfBatches()],
        validation_data=(X[:13], Y[:13], WEIGHTS[:13]) if len(model.outputs) == 1 else None,
        shuffle=False,
        sample_weight=weights,
    ).history
    # Keras's losses of outputs count a smaller last batch as a whole one, and `root` is told.
    for name in ("root", "val_root", "head0_loss", "head1_loss"):
        history.pop(name, None)
    return found_in(model, history)


@pytest.fixture(autouse=True)
def _seeds_of_keras(monkeypatch: Patch) -> None:
    """Seeds initializers as Keras does, also after a test in whose process a run has seeded
    them."""
    monkeypatch.setattr("keras.src.random.seed_generator.python_random", random)


@parametrize(
    "says, build, line",
    [
        pytest.param(*case[1:], id=str(number), marks=[] if number in QUICK else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_a_run_does_what_the_page_says(
    says: str, build: Callable[[], Any], line: str, caplog: Log
) -> None:
    if line and "refused" in says:
        with refused(line):
            launched(lambda: trained(build), 2)
        return
    expected = trained(build)
    for replicas in (1, 2):
        found, _ = launched(lambda: trained(build), replicas)
        assert difference(expected, found) < 1e-10
    assert line in caplog.text


def test_limits_of_keras_are_refused() -> None:
    keras.config.set_max_epochs(1)
    try:
        with refused("KERAS_MAX_EPOCHS and KERAS_MAX_STEPS_PER_EPOCH limit `fit` alone"):
            launched(lambda: trained(network), 1)
    finally:
        keras.config.set_max_epochs(None)


@SLOW
@parametrize("scales", [True, False])
def test_a_loss_is_scaled_as_in_fit(scales: bool) -> None:
    expected = trained(lambda: network(auto_scale_loss=scales), "mixed_float16")
    found, _ = launched(
        lambda: trained(lambda: network(auto_scale_loss=scales), "mixed_float16"), 1
    )
    assert difference(expected, found) < 1e-6


def test_the_page_has_these_rows() -> None:
    rows = [
        line.strip("| \n").split(" | ")
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    assert {(row, says) for row, says, *_ in CASES} <= {tuple(row) for row in rows}
