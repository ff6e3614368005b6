"""Shards the slots of optimizers over replicas (`--shard_optimizer`): each keeps and updates its part of them.

Stage 1 of ZeRO: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054. A replica updates its part of each weight,
and all gather the weights. Clipping, decay and constraints take whole gradients and weights, so the numbers stay. A
slot keeps the shape of its weight, but its values are in a flat variable, in which each replica has another part.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.invariance.compat import averages_of, replace_updates, replace_value, trained_by
from trainer.invariance.fused_updates import FUSED, Part, fused_slots
from trainer.invariance.reachable import optimizers_of

_FEWEST = 1024  # elements of a part: slots of smaller weights stay whole

_numbers = itertools.count()  # of the variables that live within a step


def shard_optimizers(model: keras.Model) -> None:
    """Shards the slots and moving averages (`use_ema`) of a model's optimizers; on one replica nothing changes.

    Averages stay whole over several workers, each of which evaluates them. Call it under the strategy's scope, once the
    optimizers are built and sum over replicas. Raises UserError for one that does not update each variable element by
    element in one operation.
    """
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    for optimizer in optimizers_of(model):
        slots = slots_to_shard(optimizer, replicas, averages=not strategy.cluster_resolver) if optimizer.built else []
        if replicas == 1 or not slots:
            continue
        for slot in slots:
            _shard(slot)
        moves_parts = any(map(is_sharded, averages_of(optimizer)))
        average = partial(_move_averages, optimizer) if moves_parts else None
        replace_updates(optimizer, partial(_update, optimizer), average)
        size = sum(math.prod(slot.shape) * tf.as_dtype(slot.dtype).size for slot in slots) / 2**20
        log.info(f"shard_optimizer: each replica keeps 1/{replicas} of {size:.3g} MiB of slots of {optimizer.name}")


def slots_to_shard(optimizer: Any, replicas: int, *, averages: bool = True) -> list[Any]:
    """Returns the slots of a built optimizer of which each of `replicas` keeps a part, ceil(n / replicas) of n elements.

    averages: whether moving averages are among them. Raises UserError for an optimizer that cannot be sharded.
    """
    slots = []
    for index, variable in enumerate(trained_by(optimizer)):
        of_variable = fused_slots(optimizer, variable)
        if not of_variable:
            raise UserError(
                f"shard_optimizer: {type(optimizer).__name__} does not update each element of a weight by itself, in "
                f"one operation: use {FUSED}, of keras.optimizers itself, or drop --shard_optimizer"
            )
        if math.prod(variable.shape) >= _FEWEST * replicas:
            slots += [*of_variable, *(averages_of(optimizer)[index : index + 1] if averages else [])]
    return slots


def is_sharded(variable: Any) -> bool:
    """Returns whether a variable has other values on each replica, its parts."""
    return isinstance(variable, keras.Variable) and variable.value.shape != variable.shape


def whole(variable: Any) -> Any:
    """Returns the values of a variable, those of a sharded one put together, with zeros for parts on other workers."""
    if not is_sharded(variable):
        return tf.convert_to_tensor(variable)
    strategy = variable.value.distribute_strategy
    parts = [tf.convert_to_tensor(part) for part in strategy.experimental_local_results(variable.value)]
    first = strategy.cluster_resolver.task_id * len(parts) if strategy.cluster_resolver else 0
    others = strategy.num_replicas_in_sync - first - len(parts)
    return _joined(tf.pad(tf.stack(parts), [[first, others], [0, 0]]), variable)


def assign_whole(variable: Any, values: Any) -> None:
    """Sets a variable to `values`, of its shape; of a sharded one each replica takes its part."""
    if not is_sharded(variable):
        variable.assign(values)
        return
    part = variable.value
    part.distribute_strategy.run(lambda: part.assign(_own_part(values)))


def _shard(slot: keras.Variable) -> None:
    """Makes each replica hold its part of a slot alone."""
    values, replicas = tf.convert_to_tensor(slot), tf.distribute.get_strategy().num_replicas_in_sync
    part = tf.Variable(
        tf.zeros([-(-math.prod(slot.shape) // replicas)], slot.dtype),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.NONE,
    )
    replace_value(slot, part)
    assign_whole(slot, values)


def _own_part(values: Any) -> Any:
    """Returns this replica's part of `values`, flat: row `replica` of (replicas, elements), with zeros at the end."""
    replica = tf.distribute.get_replica_context()
    number, replicas = tf.get_static_value(replica.replica_id_in_sync_group), replica.num_replicas_in_sync
    flat = tf.reshape(values, (-1,))
    return tf.reshape(tf.pad(flat, [[0, -flat.shape[0] % replicas]]), (replicas, -1))[number]


def _joined(parts: Any, variable: Any) -> Any:
    """Returns the parts of a variable, (replicas, elements), as values of its shape."""
    return tf.reshape(tf.reshape(parts, (-1,))[: math.prod(variable.shape)], variable.shape)


def _update(optimizer: Any, of_keras: Callable[..., None]) -> Callable[..., None]:
    """Returns what updates variables, by `of_keras` those whose slots are whole."""

    def update(gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        groups: dict[str, list[Any]] = {}  # of what is gathered at once: of one type, and what is not, as ""
        for gradient, variable in zip(gradients, variables, strict=True):
            kind = variable.dtype if is_sharded(fused_slots(optimizer, variable)[0]) else ""
            groups.setdefault(kind, []).append((gradient, variable))
        if "" in groups:
            of_keras(*zip(*groups.pop(""), strict=True), learning_rate)
        replica = tf.distribute.get_replica_context()
        for group in groups.values():
            parts = [_updated_part(optimizer, gradient, variable, learning_rate) for gradient, variable in group]
            gathered = tf.reshape(replica.all_gather(tf.concat(parts, 0), 0), (replica.num_replicas_in_sync, -1))
            columns = tf.split(gathered, [part.shape[0] for part in parts], axis=1)
            for (_, variable), values in zip(group, columns, strict=True):
                tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=_joined(values, variable))

    return update


def _updated_part(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> Any:
    """Returns this replica's part of a weight after its update, which changes the slots.

    The operation needs a resource: one that lives until its value is read.
    """
    value, device = _own_part(variable.value), variable.value.device
    handle = tf.raw_ops.VarHandleOp(
        dtype=value.dtype, shape=value.shape, shared_name=f"shard_optimizer/{next(_numbers)}"
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    optimizer.update_step(_own_part(gradient), Part(variable, handle, value.dtype, device), learning_rate)
    updated = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
    tf.raw_ops.DestroyResourceOp(resource=handle)
    updated.set_shape(value.shape)
    return updated


def _move_averages(optimizer: Any, variables: Sequence[Any]) -> None:
    """Moves averages as Keras does, of which a replica may have a part: at the first update they become the weights."""
    for variable, average in zip(variables, averages_of(optimizer), strict=True):
        before, values = tf.convert_to_tensor(average.value), tf.convert_to_tensor(variable.value)
        keep = tf.cast(keras.ops.not_equal(optimizer.iterations, 0), before.dtype) * optimizer.ema_momentum
        moved = keep * before + (1 - keep) * (_own_part(values) if is_sharded(average) else values)
        tf.raw_ops.AssignVariableOp(resource=average.value.handle, value=moved)
