"""Softens the labels of training, by label smoothing and mixup, as functions of (seed, step, global row).

Label smoothing (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567, section 7) gives a share of each label to all
classes alike. Mixup (Zhang et al. 2018, https://arxiv.org/abs/1710.09412) takes weighted means of two examples and of
their labels, with weights of Beta(alpha, alpha).

Partners are rows 2k and 2k + 1 of the global batch. The order of the rows is random already, so these pairs are as
random as those of a permutation; and a replica with an even number of rows has both rows of each pair, so that any
split of the batch mixes the same rows, with nothing read twice and nothing sent. Each row keeps the larger of the two
weights, as neither order of a pair is more likely: no example is lost from a batch, and the label with the largest
share is the row's own.
"""

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from trainer.base.settings.train_config import TrainConfig
from trainer.invariance.step import StepContext

Soften = Callable[[Any, StepContext], Any]


def softening(config: TrainConfig, classes: int) -> Soften | None:
    """Returns a function that softens (x, y) or (x, y, sample_weight); None without label smoothing and mixup.

    It takes x of floating-point numbers, (rows, …), and integer labels, and returns y as (rows, classes) in floatx. The
    weight of a row stays its own.
    """
    smoothing, alpha = config.label_smoothing, config.mixup
    if not (smoothing or alpha):
        return None

    def soften(data: Any, step: StepContext) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        labels = tf.one_hot(tf.reshape(y, (-1,)), classes, dtype=keras.config.floatx())
        labels = labels * (1.0 - smoothing) + smoothing / classes
        if alpha:
            share = own_share(step, alpha)
            x, labels = mixed(x, share), mixed(labels, share)
        return (x, labels) if weight is None else (x, labels, weight)

    return soften


def own_share(step: StepContext, alpha: float) -> Any:
    """Returns each row's share in its mixture, (rows,): the larger of b and 1 - b, with b of Beta(alpha, alpha).

    By two uniform numbers, for any alpha, without underflow: if T has Student's distribution with 2 alpha degrees of
    freedom, 1/2 + T / (2 sqrt(2 alpha + T^2)) has this one, and Bailey 1994 gives T:
    https://doi.org/10.1090/S0025-5718-1994-1219702-8
    """
    drawn = step.uniform((2,), stream="mixup")
    power = tf.math.log1p(-drawn[:, 0]) / alpha
    part = -tf.math.expm1(power) * tf.square(tf.cos(2 * math.pi * drawn[:, 1]))
    return 0.5 + 0.5 * tf.sqrt(part / (tf.exp(power) + part))


def mixed(values: Any, share: Any) -> Any:
    """Returns `share` of each row and the rest of its partner; values: (rows, …), an even number of rows."""
    shape, size = values.shape, values.shape.rank - 1
    partner = tf.reshape(tf.reverse(tf.reshape(values, (-1, 2, *shape[1:])), axis=[1]), (-1, *shape[1:]))
    return partner + tf.reshape(share, (-1, *[1] * size)) * (values - partner)
