"""Keeps an exponential moving average of weights, equal on every replica."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from trainer.invariance.compat import averages_of, trained_by


def update_average(averages: Sequence[Any], variables: Sequence[Any], decay: float, step: Any) -> None:
    """Computes averages <- d * averages + (1 - d) * variables, with d = min(decay, (1 + step) / (10 + step)).

    The lower d of the first steps keeps the random initial weights out of the average. Call it in replica context.
    averages, variables: keras.Variables of the same number and shapes; step: a tensor, counted from 0.
    """
    count = tf.cast(step, tf.float64)
    keep = tf.minimum(tf.constant(decay, tf.float64), (1.0 + count) / (10.0 + count))

    shares = {kind: tf.cast(1.0 - keep, kind) for kind in {average.dtype for average in averages}}
    for average, variable in zip(averages, variables, strict=True):
        moved = (variable.value - average.value) * shares[average.dtype]
        # On each replica's own copy, which its handle is: XLA takes no update of all replicas at once.
        tf.raw_ops.AssignAddVariableOp(resource=average.value.handle, value=moved)


def use_averages(optimizer: Any) -> None:
    """Sets weights to the averages that an optimizer with `use_ema` keeps of them, as `fit` does when it ends.

    Does nothing for other optimizers. In a keras.StatelessScope only the values of the scope change (by Keras's
    `finalize_variable_values` the weights would).
    """
    if keeps_averages(optimizer) and optimizer.built:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        for variable, average in zip(trained_by(inner), averages_of(inner), strict=True):
            variable.assign(tf.convert_to_tensor(average))


def keeps_averages(optimizer: Any) -> bool:
    """Returns whether an optimizer keeps moving averages of the weights (`use_ema`)."""
    return bool(optimizer and getattr(getattr(optimizer, "inner_optimizer", optimizer), "use_ema", False))
