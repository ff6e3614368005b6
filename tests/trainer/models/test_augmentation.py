"""Tests random changes of images, --augment and --diff_augment: how often, how far, gradients, and
draws by row."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from tests.fixtures import parametrize
from trainer.base.settings.model_settings import DIFF_AUGMENTATIONS
from trainer.data.augmentation import crop, flip
from trainer.invariance.step import StepContext, in_step
from trainer.models.image_layers import DiffAugment, color, cutout, translation

ROWS = 1000
SIZE = 16
RANDOM = default_rng(0)
NUMBERS = tf.constant(RANDOM.random((ROWS, 7)))
IMAGES = RANDOM.uniform(-1, 1, (ROWS, SIZE, SIZE, 3))


def test_color_follows_the_paper() -> None:
    brightness, saturation, contrast = (NUMBERS.numpy()[:, i, None, None, None] for i in range(3))
    expected = IMAGES + brightness - 0.5
    for factor, axes in ((2 * saturation, 3), (contrast + 0.5, (1, 2, 3))):
        mean = expected.mean(axes, keepdims=True)
        expected = (expected - mean) * factor + mean
    assert_allclose(color(tf.constant(IMAGES), NUMBERS[:, :3]), expected, atol=1e-12)


# Images whose pixels are their row and column, from 1.
Y, X = np.mgrid[1 : SIZE + 1, 1 : SIZE + 1].astype(np.float64)
COORDINATES = tf.tile(np.stack([Y, X], axis=-1)[None], (ROWS, 1, 1, 1))


def moves(found: Any) -> Any:
    """Returns by how much each image has moved, (rows, 2); each of five distances has to come about
    as often."""
    moved = found[:, SIZE // 2, SIZE // 2].astype(int) - SIZE // 2 - 1
    for axis in range(2):
        assert np.bincount(moved[:, axis] + 2).min() > 120
        assert set(moved[:, axis]) == {-2, -1, 0, 1, 2}
    return moved


def test_translation_moves_rows_by_up_to_an_eighth_and_fills_with_grey() -> None:
    found = translation(COORDINATES, NUMBERS[:, :2]).numpy()
    for image, (down, right) in zip(found, moves(found), strict=True):
        inside = (np.abs(Y + down - 8.5) < 8) & (np.abs(X + right - 8.5) < 8)
        assert_array_equal(image, np.stack([Y + down, X + right], -1) * inside[..., None])


CONTEXT = StepContext(0, tf.constant(0, tf.int64), 0, ROWS, ROWS)


def test_crop_moves_rows_by_up_to_an_eighth_and_fills_by_mirroring() -> None:
    found = crop(COORDINATES, CONTEXT).numpy()
    moves(found)
    assert (found.shape, found.min(), found.max()) == (COORDINATES.shape, 1, SIZE)


def test_flip_mirrors_half_of_the_rows() -> None:
    found = flip(COORDINATES, CONTEXT).numpy()[:, 0, :, 1]
    mirrored = (found == X[0, ::-1]).all(axis=1)
    assert ((found == X[0]).all(axis=1) | mirrored).all()
    assert abs(mirrored.mean() - 0.5) < 0.05


def test_cutout_makes_a_square_of_half_the_size_grey() -> None:
    found = cutout(tf.ones((ROWS, SIZE, SIZE, 1), tf.float64), NUMBERS[:, :2]).numpy()[..., 0]
    assert set(np.unique(found)) == {0.0, 1.0}
    heights, widths = ((found == 0).any(axis).sum(axis=1) for axis in (2, 1))
    assert_array_equal((found == 0).sum((1, 2)), heights * widths)
    # Its centre may be anywhere, from one border to the other: 9 of 17 places lie wholly inside.
    assert (set(heights), set(widths)) == ({4, 5, 6, 7, 8},) * 2
    assert np.mean(heights == 8) == pytest.approx(9 / 17, abs=0.05)


@parametrize("shape", [(SIZE, SIZE, 3), (24, 24, 1)])
def test_gradients_flow_back_and_xla_computes_the_same(shape: tuple[int, ...]) -> None:
    """All changes are affine in the images, so differences of any size give the derivative."""
    augment = DiffAugment(DIFF_AUGMENTATIONS)
    images, direction, upstream = (tf.constant(RANDOM.normal(size=(8, *shape))) for _ in range(3))

    def gradient(images: Any, numbers: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(images)
            value = tf.reduce_sum(upstream * augment(images, numbers))
        return tape.gradient(value, images)

    found = gradient(images, NUMBERS[:8])
    numbers = NUMBERS[:8]
    change = augment(images + direction, numbers) - augment(images, numbers)
    assert float(tf.reduce_sum(upstream * change)) == pytest.approx(
        float(tf.reduce_sum(found * direction)), rel=1e-9
    )
    assert_allclose(tf.function(gradient, jit_compile=True)(images, numbers), found, atol=1e-12)


def drawn(first_row: int, rows: int, step: int = 0) -> list[Any]:
    with in_step(StepContext(0, tf.constant(step, tf.int64), first_row, rows, 8)):
        augment = DiffAugment(("translation", "color"))
        return [augment.draw(2).numpy(), augment.draw().numpy()]


def test_each_call_of_a_step_draws_others_and_a_row_has_its_own_anywhere() -> None:
    found = drawn(0, 8)
    assert [each.shape for each in found] == [(16, 5), (8, 5)]
    assert len(np.unique(np.concatenate([*found, *drawn(0, 8, step=1)]))) == 2 * 24 * 5
    halves = [drawn(first, 4) for first in (0, 4)]
    assert_array_equal(np.concatenate([half[1] for half in halves]), found[1])
    twice = [half[0].reshape(2, 4, 5) for half in halves]
    assert_array_equal(np.concatenate(twice, axis=1).reshape(16, 5), found[0])
