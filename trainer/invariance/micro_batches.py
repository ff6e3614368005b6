"""Runs a train_step on a replica's rows in passes, of micro-batches or of virtual replicas: gradients are applied once.

docs/decisions/10-micro-batches.md has the reasons.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import keras

from trainer.base.errors import UserError
from trainer.invariance.gradients import Update, all_reduce_sum, postponed_updates
from trainer.invariance.losses import counts_of_losses, divided_by
from trainer.invariance.step import ACCUMULATED, StepContext, running_step
from trainer.user_code.interface import ModelInterface, scalars_of


def train_step(model: keras.Model, data: Any) -> Mapping[str, Any]:
    """Returns what the model's train_step returns for this replica's rows; call it within a step.

    Raises UserError if a train_step of the user's own takes all rows at once, though the rows are to be cut.
    """
    step = running_step()
    if step is None or not step.in_passes:
        return model.train_step(data)
    if not ModelInterface.of(model).own_step:
        return _in_passes(model, data, step)
    logs = model.train_step(data)
    if not step.uses[ACCUMULATED]:
        raise UserError(
            f"{step.split}: the train_step of {type(model).__name__} takes all rows at once: sum its gradients by "
            f"current_step().accumulate(function, *rows), or drop --{step.split.partition('=')[0]}"
        )
    return logs


def _in_passes(model: keras.Model, data: Any, step: StepContext) -> Mapping[str, Any]:
    """Runs Keras's train_step on the rows of each pass, then makes its updates with the sums of their gradients.

    Keras's metrics are updated by each pass.
    """
    counts = _counts(model, data, step) if ModelInterface.of(model).counted_losses else []
    updates: list[Update] = []

    def one_pass(data: Any) -> Any:
        with postponed_updates() as postponed, divided_by(counts):
            logs = scalars_of(model.train_step(data))
        updates[:] = postponed
        return logs, [update.gradients for update in postponed]

    logs, gradients = step.accumulate(one_pass, data)
    for update, summed in zip(updates, gradients, strict=True):
        update.apply(summed, update.variables)
    return logs


def _counts(model: keras.Model, data: Any, step: StepContext) -> list[Any]:
    """Returns the counts by which the losses divide, over the rows of all passes and replicas, in the order of losses.

    TensorFlow removes from these passes what the counts do not need: most often all but the masks.
    """
    trial = replace(step, uses=Counter(step.uses))
    return all_reduce_sum(trial.accumulate(partial(counts_of_losses, model), data))
