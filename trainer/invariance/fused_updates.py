"""Makes Keras's own optimizers update a variable in one operation of TensorFlow, where Keras uses up to twenty.

They cost memory traffic on a CPU, and on a GPU time to launch. The class of the optimizer, its slots and settings stay.
Schedules, decay, clipping and averages remain Keras's, around the update; its numbers are Keras's up to rounding.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from trainer.invariance.compat import slots_of


def _adam(optimizer: Any, count: Any) -> dict[str, Any]:
    """Returns what all variables share, for update number `count`: Kingma and Ba 2015, arxiv.org/abs/1412.6980."""
    beta1, beta2, epsilon = (
        tf.constant(x, count.dtype) for x in (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)
    )
    powers = {"beta1_power": beta1**count, "beta2_power": beta2**count}
    return {**powers, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}


def _sgd(optimizer: Any, count: Any) -> dict[str, Any]:
    return {"momentum": tf.constant(optimizer.momentum, count.dtype), "use_nesterov": optimizer.nesterov}


def _rmsprop(optimizer: Any, count: Any) -> dict[str, Any]:
    return {name: tf.constant(getattr(optimizer, name), count.dtype) for name in ("rho", "momentum", "epsilon")}


# By class: the operation, the attributes of its slots by the operation's names, and its numbers.
_ADAM = (tf.raw_ops.ResourceApplyAdam, {"m": "_momentums", "v": "_velocities"}, _adam)
_OPERATIONS: dict[type, tuple[Callable[..., Any], dict[str, str], Callable[[Any, Any], dict[str, Any]]]] = {
    keras.optimizers.Adam: _ADAM,
    keras.optimizers.AdamW: _ADAM,
    keras.optimizers.SGD: (tf.raw_ops.ResourceApplyKerasMomentum, {"accum": "momentums"}, _sgd),
    keras.optimizers.RMSprop: (tf.raw_ops.ResourceApplyRMSProp, {"ms": "_velocities", "mom": "_momentums"}, _rmsprop),
}


def fuse_updates(optimizer: Any) -> Callable[[], None]:
    """Replaces `update_step` of a built optimizer, if there is an operation for it; else Keras's stays.

    For Adam and AdamW without amsgrad, SGD with momentum, and RMSprop with momentum that is not centered: without, the
    operation would need a slot that Keras does not have. No subclass, which may change what these do. Returns what to
    call before each update.
    """
    without = not getattr(optimizer, "momentum", True) or any(
        getattr(optimizer, name, False) for name in ("amsgrad", "centered")
    )
    if type(optimizer) not in _OPERATIONS or without:
        return lambda: None
    operation, names, numbers = _OPERATIONS[type(optimizer)]
    shared: dict[Any, dict[str, Any]] = {}

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        slots = slots_of(optimizer, variable, names.values())
        kind = variable.dtype
        place = (tf.compat.v1.get_default_graph(), variable.device, kind)
        if place not in shared:  # computed once for all variables of an update
            count = tf.cast(keras.ops.convert_to_tensor(optimizer.iterations), kind) + 1
            shared[place] = {"lr": tf.cast(learning_rate, kind), **numbers(optimizer, count)}
        handles = {name: slot.value.handle for name, slot in zip(names, slots, strict=True)}
        gradient = tf.cast(tf.convert_to_tensor(gradient), kind)
        operation(var=variable.handle, grad=gradient, **handles, **shared[place])

    optimizer.update_step = update_step
    return shared.clear
