"""Holds every private name of Keras and TensorFlow that this package uses; no other module uses one.

Each is looked up when a run first needs it: a release without it, or with other parameters, stops only the runs that
need it, with one line. TRIED names the versions that all of them were tried with.
"""

import functools
import inspect
import itertools
import pkgutil
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import keras
import tensorflow as tf

TRIED = "TensorFlow 2.20 or 2.21 with Keras 3.15"


class Missing(RuntimeError):
    """Reports a private name that the installed release no longer has, or now has with other parameters."""

    def __init__(self, name: str) -> None:
        installed = f"TensorFlow {tf.__version__} with Keras {keras.__version__}"
        super().__init__(f"{name} is missing or has changed in {installed}: install {TRIED}")


def reset_layer_names() -> None:
    """Restarts the numbers in layers' default names, so that a model's names do not depend on earlier models.

    Layers draw by the names of their paths. Keras's public `clear_session` would reset its global settings too.
    """
    _private("keras.src.utils.naming.reset_uids")()


def seed_initializers(seed: int) -> None:
    """Gives Keras a separate generator for the seeds of its initializers.

    Keras takes them from Python's global generator, from which other threads draw too (retries of Cloud Storage
    requests do). The numbers are the same.
    """
    name = "keras.src.random.seed_generator.python_random"
    _private(name)
    generator = pkgutil.resolve_name(name.rpartition(".")[0]).python_random = random.Random(seed)  # noqa: S311
    start = generator.getstate()
    keras.initializers.GlorotUniform()  # draws a seed, unless Keras now takes it from elsewhere
    if generator.getstate() == start:
        raise Missing(name)
    generator.setstate(start)


def intercept_random(around: Callable[[Callable[..., Any]], Callable[..., Any]], names: Iterable[str]) -> None:
    """Replaces Keras's random functions by `around(function)`, once a process; `names` are those of keras.random.

    All layers and `keras.random` itself draw by them, with the parameters of keras.random.
    """
    module = _private("keras.src.backend.tensorflow.random")
    for name in names:
        function, public = getattr(module, name, None), getattr(keras.random, name)
        if not function or inspect.signature(function).parameters.keys() != inspect.signature(public).parameters.keys():
            raise Missing("keras.src.backend.tensorflow.random")
        if not hasattr(function, "__wrapped__"):
            setattr(module, name, functools.wraps(function)(around(function)))


def floats_of_variables() -> None:
    """Makes `float(variable)` and `int(variable)` work on several replicas as on one: TensorFlow's values lack both."""
    for name, number in (("__float__", float), ("__int__", int)):
        if not hasattr(tf.distribute.DistributedValues, name):
            setattr(tf.distribute.DistributedValues, name, lambda values, number=number: number(values.numpy()))


@functools.cache
def compare_signs_on_device() -> None:
    """Makes Keras's argmax, and so its accuracies, stay on a GPU, from the first call on in this process.

    Keras compares the sign bit as int32, which a GPU's kernels do on the host: with `metrics=["accuracy"]` the logits
    are copied there in each step. As uint32 the same bits are compared on the device.
    """
    original = _private("keras.src.backend.tensorflow.numpy.signbit", 0.0)

    @functools.wraps(original)
    def signbit(x: Any) -> Any:
        if not isinstance(x, tf.Tensor) or not x.dtype.is_floating:
            return original(x)
        return tf.bitcast(tf.cast(x, tf.float32), tf.uint32) >= 2**31

    pkgutil.resolve_name("keras.src.backend.tensorflow.numpy").signbit = signbit


@functools.cache
def lora_in_float64() -> None:
    """Makes the matrices of LoRA float64 in layers that are, from the first call on in this process.

    Keras makes them float32 at any precision: a comparison of replicas in float64 would see their rounding.
    """
    original = keras.layers.Layer.add_weight

    @functools.wraps(original)
    def add_weight(layer: Any, *args: Any, **options: Any) -> Any:
        if str(options.get("name")).startswith("lora_") and layer.dtype_policy.variable_dtype == "float64":
            options["dtype"] = "float64"
        return original(layer, *args, **options)

    setattr(keras.layers.Layer, "add_weight", add_weight)  # noqa: B010


def separate_collectives() -> None:
    """Gives the next MirroredStrategy of this process keys of its own for its sums.

    Each strategy counts its keys from the same base, and TensorFlow keeps for the life of a process what a key was
    first used for: the sums of a second strategy fail where they differ from those of the first in order or type.
    """
    strategy = tf.distribute.MirroredStrategy
    strategy._collective_key_base = (
        _private("tensorflow.distribute.MirroredStrategy._collective_key_base", owner=strategy) + 1_000
    )


def await_silent_workers(seconds: int) -> None:
    """Makes the next strategy of several workers wait so long for one that sends TensorFlow no heartbeat.

    TensorFlow would abort the sums of all workers after ten seconds, and no process can go on after that.
    """
    context, limit = _private("tensorflow.python.eager.context.context")(), {"heartbeat_timeout_in_ms": 1000 * seconds}
    name = "tensorflow.python.eager.context.Context.configure_coordination_service"
    context.configure_coordination_service = functools.partial(_private(name, "", owner=context, **limit), **limit)


def uses_onednn() -> bool:
    """Returns whether TensorFlow computes with oneDNN here: the processor decides, or TF_ENABLE_ONEDNN_OPTS."""
    return bool(_private("tensorflow.python.util._pywrap_util_port.IsMklEnabled")())


def layers_by_path(model: keras.layers.Layer) -> dict[str, keras.layers.Layer]:
    """Returns `model` and all layers in it, at any depth, by a path of names; no two have the same path.

    `model.layers` has only the outermost. A layer that is reached in several ways has the first of its paths.
    """
    layers: dict[str, keras.layers.Layer] = {}
    seen: set[int] = set()
    direct = {"include_self": False, "recursive": False}

    def visit(layer: Any, path: str) -> None:
        if id(layer) in seen or not isinstance(layer, keras.layers.Layer):
            return
        seen.add(id(layer))
        others = (f"{path}#{number}" for number in itertools.count(2))
        path = next(free for free in itertools.chain([path], others) if free not in layers)
        layers[path] = layer
        for child in _private("keras.layers.Layer._flatten_layers", owner=layer, **direct)(**direct):
            visit(child, f"{path}/{child.name}")

    visit(model, model.name)
    return layers


def all_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns `model` and all layers in it, at any depth."""
    return list(layers_by_path(model).values())


def mask_of(tensor: Any) -> Any:
    """Returns the mask that Keras attached to a tensor; None if it has none."""
    return _private("keras.src.backend.common.masking.get_keras_mask", tensor)(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, as Keras does, unless it is None."""
    if mask is not None:
        _private("keras.src.backend.common.masking.set_keras_mask", tensor, mask)(tensor, mask)


@contextmanager
def losses_kept(model: keras.Model) -> Iterator[None]:
    """Leaves the losses that layers added, `layer.losses`, as they were before the block.

    Where replicas wait for each other, those of another one take the same lists meanwhile.
    """
    layers = all_layers(model)
    before = [list(_private("keras.layers.Layer._losses", owner=layer)) for layer in layers]
    yield
    for layer, losses in zip(layers, before, strict=True):
        layer._losses.clear()
        layer._losses.extend(losses)


def outside_conditions(graph: Any) -> Any:
    """Returns the graph around the branches of conditions that `graph` lies in; `graph` itself outside of them."""
    branch = _private("tensorflow.python.ops.control_flow_v2_func_graphs.CondBranchFuncGraph", "")
    while isinstance(graph, branch):
        graph = graph.outer_graph
    return graph


def compiled_by_xla() -> bool:
    """Returns whether what is traced now lies in a function with jit_compile=True."""
    inside = _private("tensorflow.python.ops.control_flow_util.GraphOrParentsInXlaContext", None)
    return not tf.executing_eagerly() and bool(inside(tf.compat.v1.get_default_graph()))


def build_compiled(model: keras.Model, batch: Any) -> None:
    """Creates the variables of a compiled model's optimizer, loss and metrics, as `fit` does.

    Only the shapes and types of `batch` are used.
    """
    _private("keras.Model._symbolic_build", owner=model, data_batch=batch)(data_batch=batch)


def disable_gradient_sum(optimizer: keras.optimizers.Optimizer) -> None:
    """Stops Keras from summing gradients over replicas, which `trainer.invariance.gradients` does earlier."""
    _private("keras.optimizers.Optimizer._all_reduce_sum_gradients", [], owner=optimizer)
    optimizer._all_reduce_sum_gradients = list


def slots_of(optimizer: keras.optimizers.Optimizer, variable: Any, names: Iterable[str]) -> list[Any]:
    """Returns the slots that an optimizer keeps for `variable` in its lists of these names."""
    index = _private("keras.optimizers.Optimizer._get_variable_index", variable, owner=optimizer)(variable)
    kind = "keras.optimizers." + type(optimizer).__name__.replace("AdamW", "Adam")
    return [_private(f"{kind}.{name}", owner=optimizer)[index] for name in names]


def trained_by(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables that an optimizer was built for."""
    variables: list[Any] = _private("keras.optimizers.Optimizer._trainable_variables", owner=optimizer)
    return variables


def averages_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the moving averages that an optimizer keeps of the variables of `trained_by`; none without `use_ema`."""
    if not optimizer.use_ema:
        return []
    averages: list[Any] = _private("keras.optimizers.Optimizer._model_variables_moving_average", owner=optimizer)
    return averages


def key_of(optimizer: keras.optimizers.Optimizer, variable: Any) -> Any:
    """Returns by what an optimizer finds the slots of `variable`: the `_unique_id` of it, or of what stands for it."""
    return _private("keras.optimizers.Optimizer._var_key", variable, owner=optimizer)(variable)


def replace_updates(optimizer: keras.optimizers.Optimizer, around: Callable[..., Any]) -> None:
    """Makes an optimizer update variables by `around(original)`."""
    original = _private("keras.optimizers.Optimizer._backend_update_step", [], [], 0.0, owner=optimizer)
    optimizer._backend_update_step = around(original)


def replace_value(variable: keras.Variable, value: tf.Variable, kind: type[keras.Variable]) -> None:
    """Makes `variable` hold its values in another variable, which may have another shape, and be of a class for it."""
    _private("keras.Variable._value", owner=variable)
    variable._value, variable.__class__ = value, kind


def graph_of_function(graph: Any, name: str) -> Any:
    """Returns the graph of a function that `graph` calls."""
    return _private("tensorflow.Graph._get_function", name, owner=graph)(name).graph


def makes_batches(dataset: tf.data.Dataset) -> bool:
    """Returns whether the elements of a tf.data.Dataset are batches of examples, not single examples.

    They are if all parts have an unknown first length, and are not if one has no first length. Where all have a fixed
    one (as `batch(32, drop_remainder=True)` gives), the names of the transformations tell.
    """
    lengths = [spec.shape[0] if spec.shape.rank else 0 for spec in tf.nest.flatten(dataset.element_spec)]
    if len(set(lengths)) > 1 or lengths[0] == 0:
        return False
    if lengths[0] is None:
        return True
    transformations: list[Any] = [dataset]
    while transformations:
        transformation = transformations.pop()
        kind = type(transformation).__name__.lower()
        if "batch" in kind:
            return "unbatch" not in kind
        transformations += _private("tensorflow.data.Dataset._inputs", owner=transformation)()
    return False


@contextmanager
def losses_reduced_by(reduce: Callable[..., Any], parts: Callable[[], int] | None = None) -> Iterator[None]:
    """Makes Keras's losses combine their values by `reduce(original, values, sample_weight, mask, reduction, dtype)`.

    Within the block, `keras.losses.Loss.__call__` calls `reduce` with its original function as the first argument.
    `parts`: gives the number by which Keras divides other losses there, instead of the number of replicas.
    """
    name = "keras.src.losses.loss.reduce_weighted_values"
    original = _private(name, 0, sample_weight=None, mask=None, reduction=None, dtype=None)
    module = pkgutil.resolve_name("keras.src.losses.loss")

    def reduced(
        values: Any, sample_weight: Any = None, mask: Any = None, reduction: Any = "", dtype: Any = None
    ) -> Any:
        return reduce(original, values, sample_weight, mask, reduction, dtype)

    originals = {"reduce_weighted_values": original}
    replaced: dict[str, Any] = {"reduce_weighted_values": reduced}
    if parts:
        divide, multiply = (f"{way}_loss_for_distribution" for way in ("scale", "unscale"))
        originals[divide] = _private("keras.src.losses.loss.scale_loss_for_distribution", 0)
        originals[multiply] = _private("keras.src.losses.loss.unscale_loss_for_distribution", 0)
        replaced |= {divide: lambda value: value / parts(), multiply: lambda value: value * parts()}
    vars(module).update(replaced)
    try:
        yield
    finally:
        vars(module).update(originals)


@contextmanager
def cpu_devices_per_worker(count: int) -> Iterator[None]:
    """Makes a MultiWorkerMirroredStrategy created in the block use `count` logical CPU devices of its worker.

    TensorFlow itself uses one. A count below 2 changes nothing.
    """
    if count < 2:
        yield
        return
    module = "tensorflow.python.distribute.collective_all_reduce_strategy"
    original = _private(f"{module}.CollectiveAllReduceExtended._initialize_local_devices", None, None, "")
    extended = pkgutil.resolve_name(f"{module}.CollectiveAllReduceExtended")

    def several(self: Any, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker_device}/device:CPU:{index}" for index in range(count)), "CPU"

    extended._initialize_local_devices = several
    try:
        yield
    finally:
        extended._initialize_local_devices = original


def parse_profile(content: bytes) -> Any:
    """Returns the XSpace in the content of an xplane.pb file of TensorFlow's profiler."""
    space = _private("tensorflow.tsl.profiler.protobuf.xplane_pb2.XSpace")()
    space.ParseFromString(content)
    return space


@contextmanager
def without_merging(strategy: Any) -> Iterator[None]:
    """Makes each replica update its own variables in the block, as TensorFlow does where XLA compiles for GPUs.

    Elsewhere it merges the replicas for an update, which a function that one of them calls cannot do.
    """
    extended = strategy.extended
    _private("tensorflow.distribute.StrategyExtended._use_merge_call", owner=extended)
    extended._use_merge_call = lambda: False
    try:
        with own_values_assigned():
            yield
    finally:
        del extended._use_merge_call


@contextmanager
def own_values_assigned() -> Iterator[None]:
    """Makes a replica assign its own value to a variable that takes the first replica's, as Keras counts updates.

    The values must be equal. XLA cannot wait for the first replica.
    """
    name = "tensorflow.python.distribute.values.apply_aggregation_replica_context"
    original = _private(name, None, None, None)

    def apply(value: Any, aggregation: Any, destinations: Any) -> Any:
        first = aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        return value if first else original(value, aggregation, destinations)

    module = pkgutil.resolve_name(name.rpartition(".")[0])
    module.apply_aggregation_replica_context = apply
    try:
        yield
    finally:
        module.apply_aggregation_replica_context = original


def _private(name: str, *arguments: Any, owner: Any = None, **named: Any) -> Any:
    """Returns what the private `name` is, on `owner` if given; checks that it takes the arguments.

    Raises Missing if it does not exist or takes others.
    """
    path, _, attribute = name.rpartition(".")
    try:
        value = getattr(pkgutil.resolve_name(path) if owner is None else owner, attribute)
        if callable(value):
            with suppress(ValueError):  # a built-in type has no signature
                inspect.signature(value).bind(*arguments, **named)
    except (ImportError, AttributeError, TypeError):
        raise Missing(name) from None
    return value
