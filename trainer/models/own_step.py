"""Prepares the optimizers of a model with a train_step of its own that was written for `fit`, with stock optimizers."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.invariance.compat import build_compiled, losses_kept
from trainer.invariance.gradients import sum_first, sums_first
from trainer.invariance.reachable import reachable
from trainer.invariance.step import ASKED, StepContext, in_step
from trainer.user_code.interface import ModelInterface
from trainer.user_code.mistakes import as_user_mistake, message_of


def build_if_called(model: keras.Model, dataset: Dataset) -> None:
    """Builds a compiled model, its loss and its metrics, if its `call` takes x; a GAN's may take something else."""
    if model.compiled and type(model).call is not keras.Model.call:
        rows = tf.nest.map_structure(lambda spec: tf.zeros((1, *spec.shape), spec.dtype), dataset.spec)
        with suppress(Exception):  # the train_step tells what is wrong
            build_compiled(model, dataset.as_fit(rows))


def prepare_own_step(model: keras.Model, config: TrainConfig, dataset: Dataset) -> None:
    """Builds the optimizers on the variables that the train_step gives them, and makes them reduce over replicas first.

    Does nothing for optimizers of `sum_and_build`. Call it under the strategy's scope, where `fit` would build them
    too. Sets `model.means_of_rows`.
    """
    optimizers = [optimizer for optimizer in _optimizers(model) if not sums_first(optimizer)]
    if not optimizers:
        return
    variables_of, wants_replicas = _traced(model, optimizers, config, dataset)
    for optimizer in optimizers:
        if variables := variables_of.get(id(optimizer)):
            if not optimizer.built:
                optimizer.build(variables)
            sum_first(optimizer, mean=not wants_replicas)
            # A step may read `model.losses` after it: these are still those of its replica.
            optimizer.apply = losses_kept(model)(optimizer.apply)
    model.means_of_rows = not wants_replicas


def _optimizers(model: keras.Model) -> list[Any]:
    optimizers = [part for part in reachable(model) if isinstance(part, keras.optimizers.Optimizer)]
    inner = {id(getattr(optimizer, "inner_optimizer", None)) for optimizer in optimizers}
    return [optimizer for optimizer in optimizers if id(optimizer) not in inner]


def _traced(
    model: keras.Model, optimizers: Sequence[Any], config: TrainConfig, dataset: Dataset
) -> tuple[dict[int, list[Any]], bool]:
    """Traces one step, without running it; returns each optimizer's variables, and if it asks for its context."""
    trained: dict[int, list[Any]] = {}
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    rows, passes = config.rows_per_replica(replicas), config.passes(replicas)
    interface = ModelInterface.of(model)
    shape = (interface.batches_per_step, rows) if interface.stacked else (rows,)
    wants_replicas = False

    def record(optimizer: Any) -> Any:
        def apply(gradients: Any, variables: Sequence[Any] | None = None) -> None:
            trained.setdefault(id(optimizer), list(model.trainable_variables if variables is None else variables))

        return apply

    def step(*parts: Any) -> None:
        nonlocal wants_replicas
        zero = tf.constant(0, tf.int64)
        context = StepContext(
            config.seed, zero, 0, rows, config.global_batch_size, micro_batches=passes,
            virtual_replicas=config.virtual_replicas,
        )  # fmt: skip
        with in_step(context):
            model.train_step(dataset.as_fit(parts))
        wants_replicas = wants_replicas or context.uses[ASKED] > 0

    def on_each(*parts: Any) -> None:
        tf.distribute.get_strategy().run(tf.autograph.experimental.do_not_convert(step), args=parts)

    specs = tf.nest.map_structure(lambda spec: tf.TensorSpec((*shape, *spec.shape), spec.dtype), dataset.spec)
    for optimizer in optimizers:
        optimizer.apply = record(optimizer)
    try:
        tf.function(on_each, autograph=False).get_concrete_function(*specs)
    except Exception as error:
        raise as_user_mistake(error) or UserError(
            f"model={config.model}: its train_step fails for {rows} rows of {dataset.shape}: {message_of(error)}"
        ) from error
    finally:
        for optimizer in optimizers:
            del optimizer.apply
    return trained, wants_replicas
