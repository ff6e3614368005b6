"""Tests that label smoothing and mixup are what their papers say, and the same however a batch is split."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import refused, small
from trainer.base.settings.request import resolve
from trainer.data.augmentation import own_share, softening
from trainer.invariance.step import StepContext
from trainer.models.classifiers import SoftAccuracy, SoftCrossentropy

SOFT = ("--model=mlp", "--width=16", "--precision=float64", "--label_smoothing=0.1", "--mixup=0.4")


def context(rows: int, first: int = 0, whole: int = 0) -> StepContext:
    return StepContext(3, tf.constant(5, tf.int64), first, rows, whole or rows)


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 30.0])
def test_shares_have_the_distribution_of_the_larger_beta_weight(alpha: float) -> None:
    found = np.sort(own_share(context(40_000), alpha).numpy())
    drawn = np.random.default_rng(0).beta(alpha, alpha, 40_000)
    expected = np.sort(np.maximum(drawn, 1 - drawn))
    assert np.isfinite(found).all()
    assert 0.5 <= found[0] <= found[-1] <= 1.0
    levels = np.linspace(0.5, 1.0, 200)[:-1]  # Kolmogorov and Smirnov: 0.0136 in one of a thousand pairs of samples
    apart = np.searchsorted(found, levels) - np.searchsorted(expected, levels)
    assert np.abs(apart).max() / 40_000 < 0.0136


def test_a_row_is_mixed_with_its_partner_and_keeps_the_larger_share() -> None:
    config = small("--model=mlp", "--mixup=0.4", "--label_smoothing=0.3")
    soften = softening(config, 3)
    assert soften
    x, y = np.arange(8.0, dtype=np.float32).reshape(8, 1), np.array([0, 1, 2, 0, 1, 2, 2, 2], np.int32)
    found, labels, weight = soften((tf.constant(x), tf.constant(y), tf.ones(8)), context(8))
    share = own_share(context(8), 0.4).numpy()
    partner = np.arange(8) ^ 1
    np.testing.assert_allclose(found[:, 0], share * x[:, 0] + (1 - share) * x[partner, 0], rtol=1e-6)
    smooth = 0.7 * np.eye(3)[y] + 0.1
    np.testing.assert_allclose(labels, share[:, None] * smooth + (1 - share[:, None]) * smooth[partner], rtol=1e-5)
    assert (np.argmax(labels, axis=1) == y).all()
    assert (weight.numpy() == 1).all()
    halves = [(tf.constant(x[i : i + 4]), tf.constant(y[i : i + 4])) for i in (0, 4)]
    parts = [soften(half, context(4, first, 8)) for first, half in zip((0, 4), halves, strict=True)]
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), found)
    assert softening(small("--model=mlp"), 3) is None


def test_losses_and_accuracies_of_classes_and_of_all_of_their_shares_are_equal() -> None:
    draw = np.random.default_rng(0)
    outputs, y = draw.normal(size=(6, 3)).astype(np.float32), np.array([0, 2, 1, 1, 0, 2])
    stock = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, outputs).numpy()
    for labels in (y, y[:, None], np.eye(3, dtype=np.float32)[y]):
        assert SoftCrossentropy(from_logits=True)(labels, outputs).numpy() == pytest.approx(stock, rel=1e-6)
        accuracy = SoftAccuracy()
        accuracy.update_state(labels, outputs)
        assert float(accuracy.result()) == pytest.approx(np.mean(outputs.argmax(axis=1) == y))


@pytest.mark.parametrize(("flags", "line"), [
    (["--model=wgan_gp", "--mixup=0.2"], "mixup=0.2: only mlp, cnn, efficientnet have soft labels: drop it"),
    (["--model=tests.models:classifier", "--label_smoothing=0.1"], "label_smoothing=0.1: only mlp, cnn"),
    (["--model=mlp", "--mixup=0.2", "--global_batch_size=12", "--replicas=4"],
     "global_batch_size=12 does not divide over 4 replicas x 2 rows (mixup=0.2 mixes pairs): take 8 or 16"),
    (["--model=mlp", "--mixup=0.2", "--global_batch_size=21", "--micro_batches=3"],
     "=21 does not divide over micro_batches=3 x 2 rows (mixup=0.2 mixes pairs): take 18 or 24"),
    (["--model=mlp", "--mixup=1", "--global_batch_size=1"], "take 2"),
    (["--model=mlp", "--label_smoothing=1"], "label_smoothing=1"),
])  # fmt: skip
def test_what_cannot_be_soft_is_refused(flags: list[str], line: str) -> None:
    with refused(line):
        resolve(flags)
