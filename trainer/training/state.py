"""Names, copies and restores the variables of a run: networks, averages, optimizers, random state.

TensorFlow's object graph silently leaves out the state of Keras's SeedGenerators, so the names are defined here.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.cluster.strategy import Replicas
from trainer.invariance.reachable import reachable
from trainer.invariance.sharded_slots import ShardedSlot

_SUMMED_AT_ONCE = 2**21  # elements, 16 MiB in float64: workers' parts are put together piece by piece
WEIGHTS = "model/"  # the prefix of a network's variables; all others have "training/"


def variables_of(model: keras.Model) -> dict[str, Any]:
    """Returns every variable that training changes, by a name that does not depend on strategy or replicas.

    Metrics are left out, as every call to the device resets them, and so are rates, which LearningRates holds.
    """
    metrics = {id(variable) for metric in model.metrics for variable in metric.variables}
    variables: dict[str, Any] = {}
    for variable in _all(model, metrics):
        if not _is_rate(variable):
            part = WEIGHTS if len(variables) < len(model.weights) else "training/"
            kind = variable.name.split(":")[0].split("_")[-1]  # without Keras's count of layers
            variables[f"{part}{len(variables):04d}/{kind}"] = variable
    return variables


class LearningRates:
    """Holds how callbacks changed constant learning rates, as factors: a rollback lowers the rates in the settings."""

    def __init__(self, model: keras.Model) -> None:
        self._rates = [variable for variable in _all(model, set()) if _is_rate(variable)]
        self._configured = self._now()

    def _now(self) -> list[float]:
        return [float(keras.ops.convert_to_numpy(rate)) for rate in self._rates]

    def state(self) -> list[float]:
        """Returns a factor for each rate; 1 if no callback changed it."""
        return [now / before if before else 1.0 for now, before in zip(self._now(), self._configured, strict=True)]

    def resume(self, factors: Sequence[float]) -> None:
        for rate, before, factor in zip(self._rates, self._configured, factors, strict=True):
            rate.assign(before * float(factor))


def _is_rate(variable: Any) -> bool:
    return getattr(variable, "name", "") == "learning_rate"


def _all(model: keras.Model, seen: set[int]) -> Iterator[Any]:
    """Yields the model's weights, then random state, then variables of optimizers and of the model's attributes."""
    others: list[Any] = []
    for item in reachable(model):
        if isinstance(item, keras.optimizers.Optimizer):
            others += item.variables
        elif isinstance(item, (tf.Variable, keras.Variable)) and not isinstance(item, keras.Metric):
            others.append(item)
    for variable in (*model.weights, *model.variables, *others):
        if id(variable) not in seen:
            seen.add(id(variable))
            yield variable


def snapshot(variables: Mapping[str, Any], replicas: Replicas | None = None) -> dict[str, npt.NDArray[Any]]:
    """Returns copies of the current values in the host's memory, of sharded variables put together.

    With `replicas`, parts on other workers too: all workers must call it then; else these are zeros.

    A tensor that still refers to a variable's buffer would make the next step copy the variable on the device, which
    would then hold the whole state twice until the checkpoint is written.
    """
    with tf.device("CPU:0"):  # puts sharded ones together
        values = {name: tf.convert_to_tensor(variable).numpy() for name, variable in variables.items()}
    if replicas and replicas.cluster.several:
        for name in sharded(variables):
            pieces = np.array_split(values[name].ravel(), math.ceil(values[name].size / _SUMMED_AT_ONCE))
            summed = [replicas.sum_over_workers(piece).astype(piece.dtype) for piece in pieces]
            values[name] = np.concatenate(summed).reshape(values[name].shape)
    return values


def make_whole(variables: Mapping[str, Any], replicas: Replicas) -> None:
    """Moves sharded variables, put together, to the chief's host, once no step follows; all workers must call it."""
    slots = sharded(variables)
    for name, value in snapshot(slots, replicas).items():
        if replicas.cluster.is_chief:
            slots[name].replace_by_whole(value)


def sharded(variables: Mapping[str, Any]) -> dict[str, ShardedSlot]:
    """Returns those of which each replica holds a part."""
    return {name: variable for name, variable in variables.items() if isinstance(variable, ShardedSlot)}


def digest_of(values: Mapping[str, npt.NDArray[Any]]) -> str:
    """Returns the SHA-256 of variables with their names and types: equal only where all bits are."""
    digest = hashlib.sha256()
    for name, value in values.items():
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode() + value.tobytes())
    return digest.hexdigest()


def put_back(variables: Mapping[str, Any], values: Mapping[str, npt.NDArray[Any]] | None, replicas: Replicas) -> None:
    """Sets every variable to its value on all replicas of all workers. Only the chief needs `values`."""
    with replicas.strategy.scope():
        for name, variable in variables.items():
            value = values[name] if values is not None else np.zeros(variable.shape)
            if replicas.cluster.several:
                value = replicas.sum_over_workers(value)
            variable.assign(tf.cast(value, variable.dtype))


def check_fits(variables: Mapping[str, Any], shapes: Mapping[str, Any], origin: str) -> None:
    """Raises UserError if the saved names and shapes are not those of this model."""
    ours = {name: list(variable.shape) for name, variable in variables.items()}
    theirs = {name: list(shapes[name]) for name in shapes}
    differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if differing:
        name = differing[0]
        raise UserError(
            f"{origin}: {name} is {theirs.get(name, 'missing')} in it, {ours.get(name, 'missing')} in this model: "
            "it is of another model, or of another version of Keras: use those of its run.json, or another folder"
        )
