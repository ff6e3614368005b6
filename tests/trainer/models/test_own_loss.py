"""A compute_loss of a user's own is a mean over the rows at hand: weights and losses are those of
`fit`."""

from typing import Any

import pytest
import tensorflow as tf
from keras import Input, Model, initializers, layers, losses, ops, optimizers
from numpy.random import default_rng

from tests.fixtures import parametrize
from tests.support import in_float64, largest_difference, resolved, run_steps
from trainer.invariance.step import current_step
from trainer.run.proof import PROVED
from trainer.run.replica_check import proof_of

ROWS = 48
BATCH = 8


class Penalised(Model):
    """Weighs Keras's loss by a number that it learns, and adds that number and a penalty on its
    outputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log_variance = self.add_weight(shape=(), initializer="ones", name="log_variance")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return (
            ops.exp(-self.log_variance) * loss
            + self.log_variance
            + 0.1 * ops.mean(ops.square(y_pred))
        )


class Alone(Model):
    """Computes its whole loss."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return ops.mean(ops.abs(y - y_pred)) + sum(self.losses)


class WithStep(Model):
    """Divides by the global batch, as the contract of this package asks."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return current_step().mean(ops.square(y - y_pred))


def batches(config: Any = None) -> Any:
    draw = default_rng(0)
    x = draw.normal(size=(ROWS, 6))
    parts = x, x[:, :1] - x[:, 1:2], draw.uniform(0.5, 2.0, ROWS)
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)


def build(config: Any, dataset: Any, *, kind: str = "Penalised") -> Model:
    first, second = (initializers.GlorotUniform(seed) for seed in (1, 2))
    x = Input((6,))
    regularizer = None if kind == "WithStep" else "l2"
    hidden = layers.Dense(8, "tanh", kernel_initializer=first, kernel_regularizer=regularizer)(x)
    model = globals()[kind](x, layers.Dense(1, kernel_initializer=second)(hidden))
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(optimizers.SGD(0.125), loss if kind == "Penalised" else None)
    return model


WAYS = ((), ("--replicas=2",), ("--replicas=2", "--micro_batches=2"), ("--virtual_replicas=4",))


def config_of(kind: str, *flags: str) -> Any:
    words = [f"--model={__name__}:build", f"--kind={kind}", f"--data={__name__}:batches", *flags]
    return resolved(*words, f"--global_batch_size={BATCH}", "--steps=6", "--precision=float64")


@parametrize("kind", ["Penalised", "Alone"])
def test_an_own_loss_trains_as_in_fit(kind: str) -> None:
    in_float64()
    model = build(None, None, kind=kind)
    fitted = model.fit(batches(), shuffle=False, verbose=0).history
    for flags in WAYS:
        found, logs = run_steps(config_of(kind, *flags), ROWS // BATCH)
        assert largest_difference(model, found, smallest_norm=1e-2) < 1e-10, flags
        # Keras's tracker is float32
        assert logs.means()["loss"] == pytest.approx(fitted["loss"][0], rel=1e-6)


def test_one_that_asks_for_the_step_adds_up() -> None:
    (alone, logs), (together, logs_of_two) = (
        run_steps(config_of("WithStep", *way), 6) for way in WAYS[:2]
    )
    assert largest_difference(alone, together, smallest_norm=1e-2) < 1e-10
    assert logs_of_two.means() == pytest.approx(logs.means(), rel=1e-6)


@parametrize("kind", ["Penalised", "Alone", "WithStep"])
@parametrize("flags", [(), ("--micro_batches=2",)])
def test_own_losses_are_proved(kind: str, flags: tuple[str, ...]) -> None:
    proof = proof_of(config_of(kind, *flags))
    assert proof.verdict() == PROVED, proof
