"""Sums gradients over replicas before an optimizer applies them, and makes its updates faster.

Keras's common optimizers then update a variable in one TensorFlow operation. Keras itself uses up
to twenty, which cost memory traffic on a CPU, and on a GPU time to launch. The optimizer's class,
slots and settings stay, and schedules, decay, clipping and moving averages remain Keras's. The
results are Keras's up to rounding.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.invariance.internals import (
    all_layers,
    disable_gradient_sum,
    losses_kept,
    slots_of,
    trained_by,
    wrap,
)
from trainer.invariance.step import (
    NotCompilable,
    copies_of_rows,
    holding,
    parts_on_replicas,
    running_step,
)
from trainer.invariance.virtual_replicas import dense, sum_over_replicas


class Update(NamedTuple):
    """Holds an update that an optimizer has not made yet.

    `apply` takes these, or with summed=True their sums.
    """

    apply: Callable[..., None]
    gradients: list[Any]
    variables: Sequence[Any] | None


_row_factors = [1.0]  # set by `with_tables_as_of`, for the threads of all replicas
_pending: ContextVar[list[Update] | None] = ContextVar("pending_updates", default=None)

# Settings with which Keras's update has a branch, in which a replica cannot wait for the others;
# what to do instead.
_ONE_REPLICA_ONLY = {
    "gradient_accumulation_steps": (
        "leave it out and use --micro_batches, or a larger --global_batch_size"
    ),
    "ema_overwrite_frequency": "leave it out: with use_ema the exported model has the averages",
}


def postponed_updates() -> AbstractContextManager[list[Update]]:
    """Collects the updates of `sum_first`'s optimizers in the list that it yields.

    In the block none is made.
    """
    return holding(_pending, list[Update]())


def sum_and_build(optimizer: Any, variables: Sequence[Any], precision: str) -> Any:
    """Builds `optimizer` on `variables`, with loss scaling for mixed_float16.

    Returns it, prepared by `sum_first`. Call it under the strategy's scope: an optimizer that is
    built later fails under MirroredStrategy. The loss must be divided by the global batch.
    """
    if precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(variables)
    return sum_first(optimizer)


def sum_first(optimizer: Any, *, mean: bool = False) -> Any:
    """Makes `optimizer.apply` sum gradients over replicas before they are checked for overflow.

    Keras sums after each replica has checked its own gradients: one replica could skip an update
    that another makes, or all could apply a sum that overflowed. `mean`: takes the mean over
    replicas instead of the sum. Call it under the strategy's scope. Raises UserError for settings
    that work on one replica alone.
    """
    if hasattr(optimizer.apply, "sums_first"):
        return optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    for setting, advice in _ONE_REPLICA_ONLY.items():
        if replicas > 1 and (value := getattr(inner, setting)):
            raise UserError(
                f"{setting}={value}: {type(inner).__name__} cannot do this on {replicas} replicas:"
                f" {advice}"
            )

    # This sum takes the place of Keras's own, also in each part of a MultiOptimizer.
    for member in (inner, *getattr(inner, "optimizers", ())):
        disable_gradient_sum(member)
    begin_update = fuse_updates(inner)
    apply = optimizer.apply

    # An update may be postponed, and then gets its gradients summed.
    def apply_sum(
        gradients: Sequence[Any], variables: Sequence[Any] | None = None, *, summed: bool = False
    ) -> None:
        if (pending := _pending.get()) is not None:
            pending.append(Update(apply_sum, list(gradients), variables))
            return
        if not summed:
            gradients = ExchangedGradients.of(gradients).summed().gradients()
        begin_update()
        if mean:
            parts = parts_on_replicas(tf.distribute.get_replica_context())
            gradients = [None if gradient is None else gradient / parts for gradient in gradients]
        apply(gradients, variables)

    summing = wrap(
        "keras.optimizers.Optimizer.apply",
        lambda original, *arguments, **named: apply_sum(*arguments, **named),
        owner=optimizer,
    )
    summing.sums_first = True
    return optimizer


class ExchangedGradients(NamedTuple):
    """Holds gradients in the form in which replicas exchange them; None stays None.

    TensorFlow gives the gradient of an embedding's table as slices, one for each row of the batch.
    Several may belong to one row of the table, and Adam would square each instead of their sum;
    `tf.unique`, and TensorFlow's sum of slices, make the host wait for a GPU. So a gradient becomes
    as large as its table before it is exchanged. If the table is large, replicas exchange the
    slices instead, with their table rows: all have the same number of them.
    """

    values: list[Any]  # gradients or slices
    rows: list[Any]  # the table rows of slices; None for a gradient
    sizes: list[Any]  # the shape of the table of slices; None for a gradient

    @classmethod
    def of(cls, gradients: Sequence[Any]) -> "ExchangedGradients":
        """Returns this replica's gradients in that form."""
        exchanged = cls([], [], [])
        replica = tf.distribute.get_replica_context()
        replicas = replica.num_replicas_in_sync
        for gradient in gradients:
            value = gradient
            rows = None
            size = None
            if replicas > 1 and copies_of_rows() == 1 and isinstance(gradient, tf.IndexedSlices):
                size = tf.get_static_value(gradient.dense_shape)
                slices = gradient.values
                count = gradient.values.shape[0]
                # A table is large if it has more than twice as many rows as all replicas together
                # have slices.
                if size is not None and count and size[0] > 2 * replicas * count * _row_factors[-1]:
                    # A sum joins the slices of all replicas, (replicas x slices, …), as each has
                    # its own in their place, and 0 elsewhere.
                    place = tf.one_hot(replica.replica_id_in_sync_group, replicas, dtype=tf.int64)
                    rows = tf.reshape(place[:, None] * tf.cast(gradient.indices, tf.int64), (-1,))
                    place = tf.reshape(tf.cast(place, slices.dtype), (-1, *[1] * len(slices.shape)))
                    value = tf.reshape(place * slices, (-1, *slices.shape[1:]))
            exchanged.values.append(dense(value))
            exchanged.rows.append(rows)
            exchanged.sizes.append(size)
        return exchanged

    def summed(self) -> "ExchangedGradients":
        """Returns the sums over replicas."""
        values = all_reduce_sum(self.values)
        return ExchangedGradients(values, all_reduce_sum(self.rows), self.sizes)

    def gradients(self) -> list[Any]:
        """Returns the gradients, each as large as its table."""
        gradients = []
        for value, rows, size in zip(*self, strict=True):
            if rows is not None:
                value = dense(tf.IndexedSlices(value, rows, tf.constant(size)))
            gradients.append(value)
        return gradients


def of_repeated_tokens(model: keras.Model) -> str:
    """Returns a line about tables whose repeated tokens an optimizer takes otherwise than in `fit`.

    It is "" without any. `ExchangedGradients` sums the slices of a token first; Keras's own update
    squares each of them. With SGD, which is linear in gradients, both are the same.
    """
    kinds = [type(optimizer) for optimizer in optimizers_of(model)]
    optimizers = [kind.__name__ for kind in kinds if kind is not keras.optimizers.SGD]
    layers = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.Embedding)]
    layers = [layer for layer in layers if layer.trainable]
    if not (optimizers and layers):
        return ""
    return (
        f"{layers[0].name}: gradients of a token that a batch repeats are summed before"
        f" {optimizers[0]} squares them, on any number of replicas; fit squares each by itself, and"
        " gives other numbers"
    )


@contextmanager
def with_tables_as_of(times: float) -> Iterator[None]:
    """Makes replicas exchange gradients of tables as if steps had `times` the rows, for plans."""
    _row_factors.append(times)
    try:
        yield
    finally:
        _row_factors.pop()


def all_reduce_sum(tensors: Sequence[Any]) -> list[Any]:
    """Returns each tensor summed over all replicas, None as None.

    With one replica they are the tensors themselves. Of replicas that have the same rows it is the
    mean that is summed. The gradient of such a sum is summed over replicas too. Call it in a
    replica, not while a model is built. With --virtual_replicas the order of the sum is fixed.
    Raises UserError then within a micro-batch, which has the rows of one virtual replica alone, and
    NotCompilable where XLA compiles gradients and updates as two programs.
    """
    if (step := running_step()) and step.program and step.program.gradients_only:
        raise NotCompilable(
            "it sums over replicas before its update, as batch norm over all rows does"
        )
    if step and step.virtual_replicas:
        if step.micro_batch_count > 1:
            raise UserError(
                f"{step.split}: the step sums over replicas within a micro-batch, which has the"
                " rows of one virtual replica alone: drop --virtual_replicas, or use a loss that"
                " is a mean over rows"
            )
        with _own_losses():
            return sum_over_replicas(tensors)

    # One replica has nothing to sum.
    replica = tf.distribute.get_replica_context()
    summed = list(tensors)
    if replica.num_replicas_in_sync == 1:
        return summed

    # TensorFlow packs tensors for a sum, but only of one dtype.
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    for dtype in filter(None, dict.fromkeys(dtypes)):
        places = [place for place, other in enumerate(dtypes) if other == dtype]
        parts = [tensors[place] for place in places]
        with _own_losses():
            sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, parts)
        for place, total in zip(places, sums, strict=True):
            copies = copies_of_rows()
            summed[place] = total / tf.cast(copies, total.dtype) if copies > 1 else total
    return summed


def _own_losses() -> AbstractContextManager[None]:
    """Keeps what layers added to the loss (regularizers) while this replica waits for others."""
    step = running_step()
    return losses_kept(step.layers) if step else nullcontext()


def _rounded(value: float, dtype: Any) -> Any:
    """Returns a number that Keras rounds to float32, in float64 too."""
    return tf.cast(np.float32(value), dtype)


def _adam(optimizer: Any, count: Any) -> dict[str, Any]:
    """Returns the arguments that all variables share in update `count`.

    Kingma and Ba 2015, arxiv.org/abs/1412.6980.
    """
    dtype = count.dtype
    return {
        "beta1_power": _rounded(optimizer.beta_1, dtype) ** count,
        "beta2_power": _rounded(optimizer.beta_2, dtype) ** count,
        "beta1": tf.constant(optimizer.beta_1, dtype),
        "beta2": tf.constant(optimizer.beta_2, dtype),
        "epsilon": tf.constant(optimizer.epsilon, dtype),
    }


def _rms(optimizer: Any, count: Any) -> dict[str, Any]:
    names = ("rho", "momentum", "epsilon")
    return {name: tf.constant(getattr(optimizer, name), count.dtype) for name in names}


# For each class: the operation, the optimizer's attribute for each slot that the operation takes,
# and the arguments that all variables share.
_ADAM = (tf.raw_ops.ResourceApplyAdam, {"m": "_momentums", "v": "_velocities"}, _adam)
_OPERATIONS: dict[
    type, tuple[Callable[..., Any], dict[str, str], Callable[[Any, Any], dict[str, Any]]]
] = {
    keras.optimizers.Adam: _ADAM,
    keras.optimizers.AdamW: _ADAM,
    keras.optimizers.SGD: (
        tf.raw_ops.ResourceApplyKerasMomentum,
        {"accum": "momentums"},
        lambda sgd, count: {
            "momentum": _rounded(sgd.momentum, count.dtype),
            "use_nesterov": sgd.nesterov,
        },
    ),
    keras.optimizers.RMSprop: (
        tf.raw_ops.ResourceApplyRMSProp,
        {"ms": "_velocities", "mom": "_momentums"},
        _rms,
    ),
}


def fuse_updates(optimizer: Any) -> Callable[[], None]:
    """Makes a built optimizer update each variable by one operation, if there is one.

    Returns what to call before. There is one for Adam and AdamW without amsgrad, SGD with momentum,
    and RMSprop with momentum that is not centered: without momentum the operation would need a slot
    that Keras does not have. Subclasses keep Keras's `update_step`, as they may compute something
    else. The returned function has to be called before each update of all variables.
    """
    variants = [getattr(optimizer, name, False) for name in ("amsgrad", "centered")]
    unsupported = not getattr(optimizer, "momentum", True) or any(variants)
    if type(optimizer) not in _OPERATIONS or unsupported:
        return lambda: None

    # All variables of an update on a device share arguments, which are computed once.
    operation, slot_names, shared_arguments = _OPERATIONS[type(optimizer)]
    shared = {}

    def update_step(original: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        slots = slots_of(optimizer, variable, slot_names.values())
        dtype = variable.dtype
        key = (tf.compat.v1.get_default_graph(), variable.device, dtype)
        if key not in shared:
            count = tf.cast(keras.ops.convert_to_tensor(optimizer.iterations), dtype) + 1
            shared[key] = {
                "lr": tf.cast(learning_rate, dtype),
                **shared_arguments(optimizer, count),
            }
        handles = {name: slot.value.handle for name, slot in zip(slot_names, slots, strict=True)}
        gradient = tf.cast(tf.convert_to_tensor(gradient), dtype)
        operation(var=variable.handle, grad=gradient, **handles, **shared[key])

    wrap("keras.optimizers.Optimizer.update_step", update_step, owner=optimizer)
    return shared.clear


def update_average(
    averages: Sequence[Any], variables: Sequence[Any], decay: float, step: Any
) -> None:
    """Computes averages <- d * averages + (1 - d) * variables.

    d is min(decay, (1 + step) / (10 + step)). The lower d of the first steps keeps the random
    initial weights out of the average. Call it in replica context. averages, variables:
    keras.Variables of the same number and shapes; step: a tensor, counted from 0.
    """
    count = tf.cast(step, tf.float64)
    keep = tf.minimum(tf.constant(decay, tf.float64), (1.0 + count) / (10.0 + count))

    shares = {kind: tf.cast(1.0 - keep, kind) for kind in {average.dtype for average in averages}}
    for average, variable in zip(averages, variables, strict=True):
        moved = (variable.value - average.value) * shares[average.dtype]
        # The update is by the handle of this replica's own copy, as XLA cannot compile one of all
        # replicas.
        tf.raw_ops.AssignAddVariableOp(resource=average.value.handle, value=moved)


def use_averages(optimizer: Any) -> None:
    """Sets weights to their averages (`use_ema`), as `fit` does when it ends.

    Does nothing for other optimizers.
    """
    if keeps_averages(optimizer) and optimizer.built:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        inner.finalize_variable_values(trained_by(inner))


def keeps_averages(optimizer: Any) -> bool:
    """Returns whether an optimizer keeps moving averages of the weights (`use_ema`)."""
    return bool(
        optimizer and getattr(getattr(optimizer, "inner_optimizer", optimizer), "use_ema", False)
    )


def reachable(model: keras.Model) -> list[Any]:
    """Returns all objects that a model uses, each once.

    They are those that TensorFlow tracks below it, then optimizers and variables that it misses.
    TensorFlow looks neither into the lists that Keras makes of a model's lists, nor into objects of
    a user's classes.
    """
    tracked = [*tf.train.TrackableView(model).descendants()]
    seen: set[int] = set()
    missed: list[Any] = []
    for item in tracked:
        if isinstance(item, keras.Layer):
            missed += _owned_by(item, seen)
    return [*{id(item): item for item in (*tracked, *missed)}.values()]


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the optimizers that a model holds, each once.

    Of a LossScaleOptimizer it is the inner one.
    """
    optimizers = [item for item in reachable(model) if isinstance(item, keras.optimizers.Optimizer)]
    inner = (getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers)
    return [*{id(optimizer): optimizer for optimizer in inner}.values()]


def copies_of_weights(model: keras.Model) -> list[tuple[Any, Any]]:
    """Returns the variables of optimizers that are copies of weights, each with its weight.

    ScheduleFreeAdamW has such. A list of them counts only if each equals its weight and one of
    these is not constant: Adam's zeros equal every bias of zeros.
    """
    copies = []
    for optimizer in optimizers_of(model):
        weights = trained_by(optimizer)
        for slots in vars(optimizer).values():
            if not isinstance(slots, list) or len(slots) != len(weights):
                continue
            pairs = [*zip(slots, weights, strict=True)]
            if not all(isinstance(slot, keras.Variable) for slot in slots):
                continue
            if any(slot is weight for slot, weight in pairs):
                continue
            values = [tuple(map(keras.ops.convert_to_numpy, pair)) for pair in pairs]
            equal = all(np.array_equal(slot, weight) for slot, weight in values)
            if equal and any(weight.size and np.ptp(weight) for _, weight in values):
                copies += pairs
    return copies


# The objects of these packages are searched no further.
_LIBRARIES = ("keras", "tensorflow", "numpy", "builtins", "functools", "types")


def _owned_by(item: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the optimizers and variables in an object, its containers and its plain objects."""
    if id(item) in seen:
        return
    seen.add(id(item))
    if isinstance(item, Mapping):
        values: Iterable[Any] = item.values()
    elif isinstance(item, list | tuple):
        values = item
    else:
        values = vars(item).values()
    for value in [*values]:
        if isinstance(value, keras.optimizers.Optimizer | tf.Variable | keras.Variable):
            yield value
            continue
        package = type(value).__module__.partition(".")[0]
        has_attributes = hasattr(value, "__dict__") and package not in _LIBRARIES
        plain = has_attributes and not isinstance(value, type | keras.Layer)
        if plain or isinstance(value, Mapping | list | tuple):
            yield from _owned_by(value, seen)
