"""Shards the slots of optimizers over replicas (`--shard_optimizer`): each keeps and updates its part of them.

Stage 1 of ZeRO: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054. A replica updates its part of each weight,
and all gather the weights. Clipping, decay and constraints take whole gradients and weights, so the numbers stay. A
slot keeps the shape of its weight, but its values are in a flat variable, in which each replica has another part.
"""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.invariance.gradients import optimizers_of
from trainer.invariance.internals import averages_of, key_of, replace_value, trained_by, wrap_updates
from trainer.invariance.step import holding

# Optimizers that update each element of a weight independently of the other elements.
_ELEMENTWISE = {
    getattr(keras.optimizers, name): name
    for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Ftrl", "Lion")
}
_LEAST_ELEMENTS = 1024  # of a replica's part: slots of smaller weights stay whole

_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)  # true within `parts_of_others_as_zeros`
_part_numbers = itertools.count()  # each update of a part has a resource of its own


class ShardedSlot(keras.Variable):
    """Is a slot of which each replica holds a part: within a step that part, outside of it the whole slot.

    Outside, parts on other workers read as zeros. `value` is the variable of the parts, (elements,) on each replica.
    """

    @classmethod
    def shard(cls, slot: keras.Variable) -> None:
        """Makes each replica hold its part of `slot` alone. Call it under the strategy's scope."""
        values, replicas = tf.convert_to_tensor(slot), tf.distribute.get_strategy().num_replicas_in_sync
        part = tf.Variable(
            tf.zeros([-(-math.prod(slot.shape) // replicas)], slot.dtype),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.NONE,
        )
        replace_value(slot, part, cls)
        slot.assign(values)

    def replace_by_whole(self, values: Any) -> None:
        """Turns it into an ordinary variable with these values, on the host; call it after the last step."""
        with tf.device("CPU:0"):
            replace_value(self, tf.Variable(values, trainable=False), keras.Variable)

    def assign(self, value: Any) -> Any:
        """Sets the parts that this worker holds from `value`, which has the whole slot."""
        parts, first, replicas = self._parts()
        rows = _rows(tf.cast(value, self.value.dtype), replicas)
        for number, part in enumerate(parts):
            part.assign(rows[first + number])
        return value

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        replica = tf.distribute.get_replica_context()
        if replica and replica.num_replicas_in_sync > 1:
            return tf.convert_to_tensor(self.value, dtype, name=name)
        parts, first, replicas = self._parts()
        rows = tf.stack([tf.convert_to_tensor(part) for part in parts])
        return _joined(tf.pad(rows, [[first, replicas - first - len(parts)], [0, 0]]), self)

    def numpy(self) -> Any:
        """Returns the values of the whole slot. Raises UserError if other workers have parts of it."""
        parts, _, replicas = self._parts()
        if len(parts) < replicas and not _rehearsing.get():
            raise UserError(
                f"shard_optimizer: {self.path} is read on one worker, as by a callback that saves the optimizer, and "
                "others have parts of it: drop that callback, or --shard_optimizer"
            )
        return tf.convert_to_tensor(self).numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def _parts(self) -> tuple[Sequence[Any], int, int]:
        """Returns the parts that this worker holds, the number of the first of them, and how many all workers hold."""
        strategy = self.value.distribute_strategy
        parts, workers = strategy.experimental_local_results(self.value), strategy.cluster_resolver
        return parts, workers.task_id * len(parts) if workers else 0, strategy.num_replicas_in_sync


def parts_of_others_as_zeros() -> AbstractContextManager[bool]:
    """Lets one worker read slots in the block, parts on others as zeros: a rehearsal of the export needs no values."""
    return holding(_rehearsing, True)


def shard_optimizers(model: keras.Model) -> None:
    """Shards the slots of a model's optimizers; on one replica nothing changes. Moving averages (`use_ema`) stay whole.

    Call it under the strategy's scope, once the optimizers are built and sum over replicas. Raises UserError for one
    that does not update element by element.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    for optimizer in optimizers_of(model):
        pairs = slots_to_shard(optimizer, replicas) if optimizer.built else []
        if replicas == 1 or not pairs:
            continue
        for slot, _ in pairs:
            ShardedSlot.shard(slot)
        keys = {key_of(optimizer, variable) for _, variable in pairs}
        wrap_updates(optimizer, partial(_update, optimizer, keys))
        size = sum(math.prod(slot.shape) * tf.as_dtype(slot.dtype).size for slot, _ in pairs) / 2**20
        log.info(f"shard_optimizer: each replica keeps 1/{replicas} of {size:.3g} MiB of slots of {optimizer.name}")


def slots_to_shard(optimizer: Any, replicas: int) -> list[tuple[Any, Any]]:
    """Returns the slots of a built optimizer that are large enough to be sharded, as pairs (slot, its weight).

    A replica keeps ceil(n / replicas) of the n elements of each. Raises UserError for an optimizer that cannot be
    sharded.
    """
    if type(optimizer) not in _ELEMENTWISE:
        raise UserError(
            f"shard_optimizer: {type(optimizer).__name__} is not known to update each element of a weight by itself: "
            f"use {', '.join(_ELEMENTWISE.values())} of keras.optimizers, or drop --shard_optimizer"
        )
    weights = trained_by(optimizer)
    slots = {id(variable) for variable in optimizer.variables} - set(map(id, averages_of(optimizer)))
    lists = [held for held in vars(optimizer).values() if isinstance(held, list) and len(held) == len(weights)]
    pairs = [pair for held in lists for pair in zip(held, weights, strict=True)]
    large = [(slot, weight) for slot, weight in pairs if math.prod(weight.shape) >= _LEAST_ELEMENTS * replicas]
    return [(slot, weight) for slot, weight in large if id(slot) in slots and slot.shape == weight.shape]


def _rows(values: Any, replicas: int) -> Any:
    """Cuts `values` into the parts of all replicas, (replicas, elements), padded with zeros at the end."""
    flat = tf.reshape(values, (-1,))
    return tf.reshape(tf.pad(flat, [[0, -flat.shape[0] % replicas]]), (replicas, -1))


def _own_part(values: Any) -> Any:
    """Returns this replica's part of `values`, (elements,)."""
    replica = tf.distribute.get_replica_context()
    return _rows(values, replica.num_replicas_in_sync)[tf.get_static_value(replica.replica_id_in_sync_group)]


def _joined(rows: Any, variable: Any) -> Any:
    """Joins the parts of a variable, (replicas, elements), to values of its shape: the inverse of `_rows`."""
    return tf.reshape(tf.reshape(rows, (-1,))[: math.prod(variable.shape)], variable.shape)


class _Part:
    """Stands in for a variable while an optimizer updates this replica's part; its resource lives until `updated`."""

    def __init__(self, optimizer: Any, variable: Any) -> None:
        value = _own_part(variable)
        self.dtype, self.shape, self.device = value.dtype, value.shape, variable.device
        self._unique_id = key_of(optimizer, variable)
        name = f"shard_optimizer/{next(_part_numbers)}"
        self.handle = tf.raw_ops.VarHandleOp(dtype=self.dtype, shape=self.shape, shared_name=name)
        self.assign(value)

    def assign(self, value: Any) -> None:
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def assign_add(self, value: Any) -> None:
        tf.raw_ops.AssignAddVariableOp(resource=self.handle, value=value)

    def assign_sub(self, value: Any) -> None:
        tf.raw_ops.AssignSubVariableOp(resource=self.handle, value=value)

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        return tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype), self.shape)

    def updated(self) -> Any:
        """Returns the values, and frees their resource."""
        value = tf.convert_to_tensor(self)
        tf.raw_ops.DestroyResourceOp(resource=self.handle)
        return value


def _update(
    optimizer: Any,
    keys: Collection[Any],
    original: Callable[..., None],
    gradients: Sequence[Any],
    variables: Sequence[Any],
    learning_rate: Any,
) -> None:
    """Updates variables: of those in `keys` each replica its part, which all gather then; the others by `original`."""
    groups: dict[Any, list[Any]] = {}  # by dtype, as one gather takes one; None: for `original`
    for gradient, variable in zip(gradients, variables, strict=True):
        value = variable.value if isinstance(variable, keras.Variable) else variable
        kind = value.dtype if key_of(optimizer, value) in keys else None
        groups.setdefault(kind, []).append((gradient, value))
    if None in groups:
        original(*zip(*groups.pop(None), strict=True), learning_rate)
    replica = tf.distribute.get_replica_context()
    for group in groups.values():
        parts = [_Part(optimizer, variable) for _, variable in group]
        for part, (gradient, _) in zip(parts, group, strict=True):
            optimizer.update_step(_own_part(gradient), part, learning_rate)
        sizes = [part.shape[0] for part in parts]
        gathered = replica.all_gather(tf.concat([part.updated() for part in parts], 0), 0)
        rows = tf.reshape(gathered, (replica.num_replicas_in_sync, sum(sizes)))
        for (_, variable), values in zip(group, tf.split(rows, sizes, axis=1), strict=True):
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=_joined(values, variable))
