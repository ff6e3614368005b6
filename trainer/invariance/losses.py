"""Reduces a Keras loss over the rows of all replicas and micro-batches, as one device would over
the global batch.

`train_step` cuts a replica's rows into micro-batches (with virtual replicas, one for each shard)
and applies the sum of their gradients once: docs/decisions/10-micro-batches.md gives the reasons.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.invariance.gradients import Update, all_reduce_sum, postponed_updates
from trainer.invariance.step import ACCUMULATED, holding, parts_on_replicas, running_step
from trainer.invariance.virtual_replicas import dense
from trainer.user_code.interface import ModelInterface, scalars_of

_BY_WEIGHT = "mean_with_sample_weight"
_MEANS = ("sum_over_batch_size", "mean", _BY_WEIGHT)


def _count_over_replicas(count: Any) -> Any:
    """Returns the sum of `count` over replicas.

    Raises UserError in a micro-batch, which lacks those of the others.
    """
    step = running_step()
    if step and step.micro_batch_count > 1:
        raise UserError(
            f"{step.split}: a loss within current_step().accumulate divides by a count of the"
            " global batch (of a mask, or the sum of sample weights), which no micro-batch knows:"
            f" drop --{step.split.partition('=')[0]}, or use a loss that is a mean over rows"
        )
    return all_reduce_sum([count])[0]


# Turns the count of a loss over the rows at hand into that over the global batch.
_global_count: ContextVar[Callable[[Any], Any]] = ContextVar(
    "global_count", default=_count_over_replicas
)


def root_mean_square(values: Any) -> Any:
    """Returns the root mean square of `values`, (rows,), over the rows of all replicas.

    It is the same number on each. Use it in the loss function of a compiled model.
    `reduce_over_replicas` divides the loss of each replica by their number, so that losses and
    gradients add up to those of one device. A train_step that calls current_step() divides by
    parts_of_batch() itself. All replicas must have the same number of rows. Outside of replicas, as
    in evaluation, the mean is over `values` alone. As on one device, the gradient at 0 is NaN.
    Raises UserError in a micro-batch, which ends before the rows of the next are known.
    """
    step = running_step()
    replica = tf.distribute.get_replica_context()
    if step and step.micro_batch_count > 1:
        raise UserError(
            f"{step.split}: root_mean_square needs all rows of the global batch at once: drop "
            f"--{step.split.partition('=')[0]}, or use a loss that is a mean over rows"
        )
    mean = tf.reduce_mean(tf.square(values))
    if replica is None:  # while the model is built
        return tf.sqrt(mean)
    return tf.sqrt(all_reduce_sum([mean])[0] / parts_on_replicas(replica))


def parts_of_batch() -> int:
    """Returns the number of parts of the global batch: replicas, or micro-batches of all."""
    if step := running_step():
        return step.global_batch_size // step.rows
    replica = tf.distribute.get_replica_context()
    return replica.num_replicas_in_sync if replica else 1


def counts_of_losses(model: keras.Model, rows: Any) -> list[Any]:
    """Returns the counts by which the losses of a model divide for these `rows`, in order."""
    counts = []

    def keep(count: Any) -> Any:
        counts.append(count)
        return count

    with holding(_global_count, keep):
        try_losses(model, rows)
    if step := running_step():
        step.averaged.clear()  # so that batch norm does not move its averages in this trial
    return counts


def try_losses(model: keras.Model, rows: Any) -> None:
    """Computes the losses of a compiled model in training, on `rows` as fit has them.

    It changes nothing.
    """
    x, y, weight = keras.utils.unpack_x_y_sample_weight(rows)
    # Within the scope, regularizers find no weights but those that it is given.
    values = [(variable, tf.convert_to_tensor(variable)) for variable in model.trainable_variables]
    with keras.StatelessScope(values, collect_losses=True):
        model.compute_loss(x=x, y=y, y_pred=model(x, training=True), sample_weight=weight)


def reduce_to_mean(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any,
    mask: Any,
    reduction: Any,
    dtype: Any,
) -> Any:
    """Returns a value whose mean over replicas, and micro-batches, is the loss of the global batch.

    The parameters are those of `reduce_over_replicas`. The losses of rows that are not reduced stay
    as they are.
    """
    reduced = reduce_over_replicas(original, values, sample_weight, mask, reduction, dtype)
    return reduced * parts_of_batch() if reduction in (*_MEANS, "sum") else reduced


def reduce_over_replicas(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any,
    mask: Any,
    reduction: Any,
    dtype: Any,
) -> Any:
    """Returns this replica's part of the loss of the global batch; all parts add up to it.

    `original`: Keras's reduction over one device's rows, with the same parameters; values: (rows,
        …) losses. Keras itself divides the mean over a replica's rows by the number of replicas.
        That is not the mean over all rows where rows count differently: with masks, or with the
        reduction mean_with_sample_weight. A loss that is a single number is taken for a mean over
        the replica's rows, or over all rows as `root_mean_square`. All replicas must have the same
        number of rows. Micro-batches are treated like replicas.
    """
    parts = parts_of_batch()
    if parts == 1 or reduction not in _MEANS:
        return original(values, sample_weight, mask, reduction, dtype)
    values = tf.convert_to_tensor(values) if dtype is None else tf.cast(values, dtype)
    if values.shape.rank == 0:
        weighted = sample_weight if mask is None else mask
        if weighted is None:
            return original(values, None, None, reduction, dtype) / parts
        # Keras counts it once for each weight, and divides by their number.
        values = tf.fill(tf.shape(weighted), values)

    # Without masks and weights all values count alike.
    total = original(values, sample_weight, mask, "sum", dtype)
    weights = sample_weight if reduction == _BY_WEIGHT else None
    if mask is None and weights is None:
        return total / tf.cast(tf.size(values) * parts, total.dtype)

    # The sum of a loss of 1 everywhere counts the values that the mask leaves, or adds up the
    # weights.
    count = original(tf.ones_like(values), weights, mask, "sum", dtype)
    count = _global_count.get()(tf.stop_gradient(count))
    # Several values may share a weight, which Keras counts once in the sum that it divides by.
    if weights is not None:
        sizes = [tf.size(factor) for factor in (mask, weights) if factor is not None]
        values_per_weight = tf.size(values) // tf.reduce_max(tf.stack(sizes))
        return tf.math.divide_no_nan(total, count / tf.cast(values_per_weight, count.dtype))
    return tf.math.divide_no_nan(total, count)


def train_step(model: keras.Model, data: Any) -> Mapping[str, Any]:
    """Runs the model's train_step on this replica's rows and returns its logs.

    Call it within a step. With micro-batches, Keras's train_step runs on the rows of each, which
    updates metrics; the optimizers then make one update with the summed gradients. Raises UserError
    if a train_step of the user's own takes all rows at once, though they are to be cut.
    """
    step = running_step()
    interface = ModelInterface.of(model)
    if step is None or not step.accumulates or interface.own_step:
        logs = model.train_step(data)
        if step and step.accumulates and not step.uses[ACCUMULATED]:
            raise UserError(
                f"{step.split}: the train_step of {type(model).__name__} takes all rows at once:"
                " sum its gradients by current_step().accumulate(function, *rows), or drop"
                f" --{step.split.partition('=')[0]}"
            )
        return logs

    # Losses divide by counts over all micro-batches and replicas, so a trial forward pass finds
    # these first. TensorFlow removes from the trial what the counts do not need: most often all but
    # the masks.
    counts = []
    updates = list[Update]()
    if interface.counted_losses:
        trial = replace(step, uses=Counter(step.uses))
        counts = all_reduce_sum(trial.accumulate(partial(counts_of_losses, model), data))

    # Each micro-batch computes gradients, and the update waits for their sums.
    def run_micro_batch(data: Any) -> Any:
        remaining = iter(counts)
        known = holding(_global_count, lambda count: next(remaining)) if counts else nullcontext()
        with postponed_updates() as postponed, known:
            logs = scalars_of(model.train_step(data))
        updates[:] = postponed
        return logs, [update.gradients for update in postponed]

    logs, gradients = step.accumulate(run_micro_batch, data)
    for update, summed in zip(updates, gradients, strict=True):
        if interface.means_of_rows:
            summed = [None if part is None else dense(part) / step.micro_batches for part in summed]
        update.apply(summed, update.variables)
    return logs
