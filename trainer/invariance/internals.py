"""Holds what this package relies on in Keras and TensorFlow beyond their documentation: FACTS and
MESSAGES list it all.

No other module uses a private name, and every replacement of a method goes through `wrap` or
`wrapped`. A name is looked up when a run first needs it: a release without it, or with other
parameters, stops only the runs that need it, with one line. TRIED names the versions that all of
them were tried with. A release may also keep a name and no longer call it, so
tests/trainer/invariance/test_internals.py tests the meaning of each, by a number or what it does.
"""

import functools
import importlib.util
import inspect
import itertools
import pkgutil
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

TRIED = "TensorFlow 2.20 or 2.21 with Keras 3.15"

# By name: what would be wrong if it silently stopped working. The functions below say why each is
# needed.
FACTS = {
    # Replaced for the life of a process.
    "keras.src.utils.naming.reset_uids": (
        "a process's second model would draw other numbers, as streams have the names of layers"
    ),
    "keras.src.random.seed_generator.python_random": (
        "a seed's first weights would depend on what other threads draw"
    ),
    "keras.src.backend.tensorflow.random": (
        "dropout and augmentation would differ with the number of replicas"
    ),
    "keras.src.backend.tensorflow.numpy.signbit": (
        "each step would copy logits from the GPU, for metrics=['accuracy']"
    ),
    "keras.src.backend.tensorflow.ops.numpy.signbit": (
        "the same, in releases after Keras 3.15, which moved it"
    ),
    "tensorflow.python.eager.backprop._gradient_function": (
        "a gradient of a gradient would multiply zeros: a seventh of WGAN-GP's step"
    ),
    "tensorflow.python.eager.backprop._default_vspace": "the same, in a network with residuals",
    "tensorflow.python.pywrap_tfe.TFE_Py_RegisterGradientFunction": "the same",
    "tensorflow.python.pywrap_tfe.TFE_Py_RegisterVSpace": "the same, in a network with residuals",
    "keras.layers.Layer.add_weight": (
        "LoRA would round to float32 in float64, and trainer.check would complain"
    ),
    "tensorflow.distribute.DistributedValues.__float__": (
        "a callback that reads float(variable) would fail on replicas"
    ),
    "tensorflow.distribute.DistributedValues.__int__": (
        "a callback that reads int(variable) would fail on replicas"
    ),
    "tensorflow.distribute.MirroredStrategy._collective_key_base": (
        "a process's second strategy would fail or hang"
    ),
    # Replaced on an object, or read from it.
    "keras.layers.Layer.call": (
        "layers would mistake numbers that all rows share for numbers by row, and batch norm "
        "would normalise the rows of one replica"
    ),
    "keras.layers.Layer._flatten_layers": (
        "layers within layers would draw and normalise as Keras's own"
    ),
    "keras.layers.Layer._losses": (
        "a user's train_step that reads model.losses would add those of another replica"
    ),
    "keras.layers.Layer.__dict__": (
        "a layer's SeedGenerators would have no stream of their own, and draw alike"
    ),
    "keras.Model._symbolic_build": (
        "the first step on several replicas would fail: optimizers are built within it"
    ),
    "keras.Model.compute_metrics": "a classifier's confusion matrix would be empty",
    "keras.optimizers.Optimizer.apply": (
        "each replica would check its own gradients for overflow, and micro-batches "
        "would make an update each"
    ),
    "keras.optimizers.Optimizer.update_step": (
        "updates would take up to twenty operations a variable"
    ),
    "keras.optimizers.Optimizer._all_reduce_sum_gradients": (
        "gradients would be summed twice, and updates too large by the number of replicas"
    ),
    "keras.optimizers.Optimizer._get_variable_index": (
        "a variable would be updated by the slots of another one"
    ),
    "keras.optimizers.Optimizer._trainable_variables": (
        "slots and averages would be paired with the wrong weights"
    ),
    "keras.optimizers.Adam._momentums": "Adam would use the wrong slots",
    "keras.optimizers.Adam._velocities": "Adam would use the wrong slots",
    "keras.optimizers.RMSprop._momentums": "RMSprop would use the wrong slots",
    "keras.optimizers.RMSprop._velocities": "RMSprop would use the wrong slots",
    "tensorflow.data.Dataset._inputs": (
        "batches of a tf.data.Dataset would be taken for examples, or these for batches"
    ),
    "tensorflow.Graph._get_function": "plans and MFU would miss the FLOPs of functions",
    "tensorflow.python.eager.context.context": (
        "a silent worker would abort all others after ten seconds"
    ),
    "tensorflow.python.eager.context.Context.configure_coordination_service": (
        "a silent worker would abort all others after ten seconds"
    ),
    "keras.Variable._value": (
        "a script's model would be traced with its own variables, on the devices of the run"
    ),
    "keras.Variable._initialize": "the same",
    "tensorflow.Variable._unique_id": "the same, as an optimizer would not know these variables",
    "keras.Optimizer._distribution_strategy": "the same, if a script made the optimizer in a scope",
    # Replaced within a block.
    "keras.DTypePolicy._parse_name": "a layer of a fixed dtype would compare by its rounding",
    "keras.Model.fit": "a script would train by Keras's own loop",
    "keras.Model.evaluate": (
        "a script on several replicas would get the mean of the replicas' means"
    ),
    "keras.Model.predict": "a script on several replicas could not predict an odd number of rows",
    "keras.Model.train_on_batch": "a loop of its own would train by the wrong gradients",
    "keras.Model.test_on_batch": "the same, of losses",
    "keras.Model.predict_on_batch": "a script on several replicas would get each answer twice",
    "keras.Model.save": "several workers would write the same file at once",
    "keras.Model.save_weights": "the same",
    "keras.Model.export": "the same",
    "keras.src.losses.loss.reduce_weighted_values": (
        "losses with masks or weights would be means of replicas' means"
    ),
    "keras.src.trainers.compile_utils.MetricsList.update_state": (
        "a metric without float64 would end a comparison"
    ),
    "keras.src.losses.loss.scale_loss_for_distribution": (
        "losses of layers would be divided by the wrong number"
    ),
    "keras.src.losses.loss.unscale_loss_for_distribution": (
        "the reported loss would be multiplied by the wrong number"
    ),
    "tensorflow.python.distribute.collective_all_reduce_strategy"
    ".CollectiveAllReduceExtended._initialize_local_devices": (
        "a worker would use one of its simulated devices"
    ),
    "tensorflow.python.distribute.values.apply_aggregation_replica_context": (
        "compiled steps on replicas would fail"
    ),
    "tensorflow.distribute.StrategyExtended._use_merge_call": (
        "compiled updates on replicas would fail"
    ),
    # Only called.
    "tensorflow.python.eager.context.eager_mode": (
        "a script's fit would run within the scope in which models are made"
    ),
    "tensorflow.python.ops.control_flow_util.GraphOrParentsInXlaContext": (
        "compiled steps would draw by XLA's kernels, "
        "which give other numbers, and batch norm would take a formula that loses digits"
    ),
    "tensorflow.python.eager.execute.execute": (
        "a proof would not know the sizes that a step computes from shapes"
    ),
    "tensorflow.python.ops.control_flow_v2_func_graphs.CondBranchFuncGraph": (
        "a draw in a branch would count as a loop"
    ),
    "tensorflow.python.util._pywrap_util_port.IsMklEnabled": (
        "jit_compile=auto would choose the slower way on a CPU"
    ),
    "tensorflow.tsl.profiler.protobuf.xplane_pb2.XSpace": (
        "plans would not know the peak of a step's memory"
    ),
}
# Texts in errors of Keras and TensorFlow by which they are told apart, and what would be wrong if
# they changed.
MESSAGES = {
    "Received a label value of": (
        "a wrong label would end as a traceback, not as a line about the data"
    ),
    "is not in [0, ": "a wrong token would end as a traceback, not as a line about the data",
    "was expected to be a float tensor but is a double": (
        "trainer.check would not say that a model lacks float64"
    ),
    "type float32 that does not match type float64": (
        "trainer.check would not say that a model lacks float64"
    ),
    "[Op:": "a line about an error would end with the name of TensorFlow's operation",
    "numpy() is only available when eager execution is enabled": (
        "a loop in NumPy would get no advice"
    ),
    "in user code:": "a mistake in a user's model would lack its file and line",
    "Exception encountered when calling": (
        "a line about a user's mistake would end with the arguments of a layer"
    ),
    "incompatible with the layer": (
        "data that do not fit a model would be called a mistake in its loss"
    ),
    "Detected unsupported operations": "a run would not say which operation XLA lacks",
    "Could not locate ": (
        "a saved model with a class of the user's would not be told from a damaged file"
    ),
    "not compatible with expected shape": (
        "batches of changing lengths would get no advice to pad them"
    ),
    "OOM when allocating": "a step that needs too much memory would end as a fault, without advice",
}


class Missing(RuntimeError):
    """Reports a private name that the installed release lacks, or has with other parameters."""

    def __init__(self, name: str) -> None:
        installed = f"TensorFlow {tf.__version__} with Keras {keras.__version__}"
        super().__init__(f"{name} is missing or has changed in {installed}: install {TRIED}")


def wrap(
    name: str, around: Callable[..., Any], *arguments: Any, owner: Any = None, **named: Any
) -> Any:
    """Replaces a function or method by one that calls `around(original, *arguments, **named)`.

    Returns the new one.
    name: one of FACTS; owner: the object whose method is replaced, if not for the whole class.
        arguments, named: an example of a call that `around` handles. Raises Missing if the original
        does not exist or does not accept them.
    """
    original = _private(name, *arguments, owner=owner, **named)

    @functools.wraps(original)
    def replacement(*values: Any, **options: Any) -> Any:
        return around(original, *values, **options)

    setattr(*_place(name, owner), replacement)
    return replacement


@contextmanager
def wrapped(
    name: str, around: Callable[..., Any], *arguments: Any, owner: Any = None, **named: Any
) -> Iterator[None]:
    """Replaces a function or a method in the block, as `wrap` does."""
    holder, attribute = _place(name, owner)
    before = vars(holder).get(attribute)
    wrap(name, around, *arguments, owner=owner, **named)
    try:
        yield
    finally:
        if before is None:  # the method was the class's, not the object's own
            delattr(holder, attribute)
        else:
            setattr(holder, attribute, before)


def reset_layer_names() -> None:
    """Restarts the numbers in layers' default names, which otherwise go on from model to model.

    Layers draw by the names of their paths. Keras's public `clear_session` would reset its global
    settings too.
    """
    _private("keras.src.utils.naming.reset_uids")()


def seed_initializers(seed: int) -> None:
    """Gives Keras a generator of its own for the seeds of initializers.

    The seeds are those of `random.seed(seed)`. Keras takes them from Python's global generator,
    from which other threads draw too (retries of Cloud Storage requests do).
    """
    name = "keras.src.random.seed_generator.python_random"
    _private(name)
    generator = pkgutil.resolve_name(name.rpartition(".")[0]).python_random = random.Random(seed)  # noqa: S311
    start = generator.getstate()
    keras.initializers.GlorotUniform()  # draws a seed, unless Keras now takes it from elsewhere
    if generator.getstate() == start:
        raise Missing(name)
    generator.setstate(start)


def intercept_random(around: Callable[..., Any], names: Iterable[str]) -> None:
    """Makes random functions of Keras call `around(original, …)` from now on.

    `names` are those in keras.random. It replaces the backend's functions, by which layers and
    keras.random draw. Raises Missing if one is gone, or takes other parameters than that of
    keras.random.
    """
    module = "keras.src.backend.tensorflow.random"
    for name in names:
        function = getattr(_private(module), name, None)
        public = getattr(keras.random, name)
        if not function:
            raise Missing(module)
        parameters = inspect.signature(function).parameters
        if parameters.keys() != inspect.signature(public).parameters.keys():
            raise Missing(module)
        if not hasattr(function, "__wrapped__"):
            wrap(f"{module}.{name}", around)


def floats_of_variables() -> None:
    """Makes `float(variable)` and `int(variable)` work on several replicas as on one.

    TensorFlow's values lack both.
    """
    for name, number in (("__float__", float), ("__int__", int)):
        if not hasattr(tf.distribute.DistributedValues, name):
            setattr(
                tf.distribute.DistributedValues,
                name,
                lambda values, number=number: number(values.numpy()),
            )


@functools.cache
def compare_signs_on_device() -> None:
    """Makes Keras's argmax, and so its accuracies, stay on a GPU in this process.

    Keras compares the sign bit as int32, which a GPU's kernels do on the host: with
    `metrics=["accuracy"]` the logits are copied there in each step. As uint32 the same bits are
    compared on the device.
    """

    def signbit(original: Any, x: Any) -> Any:
        if not isinstance(x, tf.Tensor) or not x.dtype.is_floating:
            return original(x)
        return tf.bitcast(tf.cast(x, tf.float32), tf.uint32) >= 2**31

    moved = importlib.util.find_spec("keras.src.backend.tensorflow.ops")
    wrap(f"keras.src.backend.tensorflow.{'ops.' if moved else ''}numpy.signbit", signbit, 0.0)


@functools.cache
def skip_zero_gradients() -> None:
    """Makes a gradient of zeros pass operations as zeros, uncomputed, in this process.

    TensorFlow's gradients of ReluGrad, LeakyReluGrad and MaxPoolGrad for the features are zeros, as
    a slope changes nowhere but in a point. A gradient of a gradient, such as WGAN-GP's penalty, so
    differentiates the whole forward pass for nothing. The operations that are traced for it stay in
    the graph, but nothing reads them any more, so that they are pruned. Gradients and their bits
    are the same; where TensorFlow gives zeros, this gives zeros.
    """

    def is_zeros(gradient: Any) -> bool:
        if not isinstance(gradient, tf.Tensor) or tf.executing_eagerly():
            return False
        return getattr(gradient, "_is_zeros_tensor", False) or gradient.op.type == "ZerosLike"

    def of_operation(
        original: Any, name: str, attributes: Any, count: int, inputs: Any, *others: Any
    ) -> Any:
        gradients = original(name, attributes, count, inputs, *others)
        _, of_outputs, *_ = others
        known = [gradient for gradient in of_outputs if gradient is not None]
        if not known or not all(map(is_zeros, known)):
            return gradients

        # An operation whose inputs are not kept has a cheap gradient, whose shape is read from it.
        parts = gradients if isinstance(gradients, list | tuple) else [gradients]
        results = []
        for part, like in zip(parts, inputs or parts, strict=True):
            shape = part if like is None else like
            results.append(tf.zeros_like(shape) if isinstance(part, tf.Tensor) else part)
        return results

    def aggregate(gradients: Any) -> Any:
        return gradients[0] if all(map(is_zeros, gradients)) else spaces.aggregate_fn(gradients)

    place = "tensorflow.python.eager.backprop"
    replacement = wrap(f"{place}._gradient_function", of_operation, "", (), 0, [], [], [], (), "")
    _private("tensorflow.python.pywrap_tfe.TFE_Py_RegisterGradientFunction")(replacement)
    spaces = _private(f"{place}._default_vspace")
    _private("tensorflow.python.pywrap_tfe.TFE_Py_RegisterVSpace")(
        type(spaces)(aggregate, *spaces[1:])
    )


@functools.cache
def lora_in_float64() -> None:
    """Makes the matrices of LoRA float64 in layers that are, in this process.

    Keras makes them float32 at any precision: a comparison of replicas in float64 would see their
    rounding.
    """

    def add_weight(original: Any, layer: Any, *args: Any, **options: Any) -> Any:
        is_lora = str(options.get("name")).startswith("lora_")
        if is_lora and layer.dtype_policy.variable_dtype == "float64":
            options["dtype"] = "float64"
        return original(layer, *args, **options)

    wrap("keras.layers.Layer.add_weight", add_weight)


def separate_collectives() -> None:
    """Gives the next MirroredStrategy of this process collective keys of its own.

    Each strategy counts its keys from the same base, and TensorFlow keeps for the life of a process
    what a key was first used for: the sums of a second strategy fail where they differ from those
    of the first in order or type.
    """
    strategy = tf.distribute.MirroredStrategy
    name = "tensorflow.distribute.MirroredStrategy._collective_key_base"
    strategy._collective_key_base = _private(name, owner=strategy) + 1_000


def await_silent_workers(seconds: int) -> None:
    """Lets TensorFlow wait `seconds` for a worker's heartbeat, under the next strategy of several.

    By default TensorFlow aborts the all-reduces of all workers after ten seconds, and no process
    can go on after that.
    """
    context = _private("tensorflow.python.eager.context.context")()
    limit = {"heartbeat_timeout_in_ms": 1000 * seconds}
    name = "tensorflow.python.eager.context.Context.configure_coordination_service"
    context.configure_coordination_service = functools.partial(
        _private(name, "", owner=context, **limit), **limit
    )


def uses_onednn() -> bool:
    """Returns whether TensorFlow computes with oneDNN here.

    The processor decides, or TF_ENABLE_ONEDNN_OPTS.
    """
    return bool(_private("tensorflow.python.util._pywrap_util_port.IsMklEnabled")())


def layers_by_path(model: keras.layers.Layer) -> dict[str, keras.layers.Layer]:
    """Returns `model` and all layers in it, at any depth, by a path of names.

    No two have the same path. `model.layers` has only the outermost. A layer that is reached in
    several ways has the first of its paths.
    """
    layers = {}
    seen = set()
    direct = {"include_self": False, "recursive": False}

    def visit(layer: Any, path: str) -> None:
        if id(layer) in seen or not isinstance(layer, keras.layers.Layer):
            return
        seen.add(id(layer))
        others = (f"{path}#{number}" for number in itertools.count(2))
        path = next(free for free in itertools.chain([path], others) if free not in layers)
        layers[path] = layer
        children = _private("keras.layers.Layer._flatten_layers", owner=layer, **direct)
        for child in children(**direct):
            visit(child, f"{path}/{child.name}")

    visit(model, model.name)
    return layers


def all_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns `model` and all layers in it, at any depth."""
    return list(layers_by_path(model).values())


@contextmanager
def plain_variables(
    variables: Iterable[keras.Variable], optimizers: Sequence[keras.Optimizer]
) -> Iterator[None]:
    """Gives each variable a value of its own for the block, which begins as the variable is.

    The values are of no strategy, and the `optimizers` then update them on one device.
    """
    name = "keras.Optimizer._distribution_strategy"
    strategies = [_private(name, owner=optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer._distribution_strategy = tf.distribute.get_strategy()
    values = [
        (variable, _private("keras.Variable._value", owner=variable)) for variable in variables
    ]
    for variable, value in values:
        start = tf.convert_to_tensor(value)
        _private("keras.Variable._initialize", start, owner=variable)(start)
        # Optimizers know a variable by this id.
        variable.value._unique_id = _private("tensorflow.Variable._unique_id", owner=value)
    try:
        yield
    finally:
        for variable, value in values:
            variable._value = value
        for optimizer, strategy in zip(optimizers, strategies, strict=True):
            optimizer._distribution_strategy = strategy


@contextmanager
def outside_of_scopes() -> Iterator[None]:
    """Leaves all scopes of strategies for the block.

    TensorFlow keeps them with the graph, also in eager mode.
    """
    with tf.Graph().as_default(), _private("tensorflow.python.eager.context.eager_mode")():
        yield


@contextmanager
def losses_kept(layers: Sequence[keras.layers.Layer]) -> Iterator[None]:
    """Restores, after the block, the losses that these layers had added (`layer.losses`).

    While this replica waits for the others in the block, another one's thread writes its losses
    into the same lists.
    """
    before = [list(_private("keras.layers.Layer._losses", owner=layer)) for layer in layers]
    yield
    for layer, losses in zip(layers, before, strict=True):
        layer._losses.clear()
        layer._losses.extend(losses)


def outside_conditions(graph: Any) -> Any:
    """Returns the innermost graph around `graph`, or itself, that is no branch of a `tf.cond`."""
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
    """Stops Keras from summing gradients over replicas, as this package sums them earlier."""
    _private("keras.optimizers.Optimizer._all_reduce_sum_gradients", [], owner=optimizer)
    optimizer._all_reduce_sum_gradients = list


def slots_of(
    optimizer: keras.optimizers.Optimizer, variable: Any, names: Iterable[str]
) -> list[Any]:
    """Returns the slots that an optimizer keeps for `variable` in its lists of these names."""
    index = _private("keras.optimizers.Optimizer._get_variable_index", variable, owner=optimizer)(
        variable
    )
    kind = "keras.optimizers." + type(optimizer).__name__.replace("AdamW", "Adam")
    return [_private(f"{kind}.{name}", owner=optimizer)[index] for name in names]


def trained_by(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables that an optimizer was built for."""
    return list(_private("keras.optimizers.Optimizer._trainable_variables", owner=optimizer))


def graph_of_function(graph: Any, name: str) -> Any:
    """Returns the graph of a function that `graph` calls; None if it is not kept, as of a Defun."""
    function = _private("tensorflow.Graph._get_function", name, owner=graph)(name)
    return getattr(function, "graph", None)


def in_float64() -> AbstractContextManager[None]:
    """Makes layers, losses and metrics that name a narrower dtype compute in float64.

    It holds in the block.
    """

    def widened(original: Any, policy: Any, name: str) -> tuple[str | None, ...]:
        narrow = ("float32", "float16", "bfloat16")
        return tuple("float64" if dtype in narrow else dtype for dtype in original(policy, name))

    return wrapped("keras.DTypePolicy._parse_name", widened, None, "float32")


def run_operation(operation: Any, values: Any) -> list[Any]:
    """Returns as arrays what an operation of a graph gives for these values of its inputs."""
    attributes: tuple[Any, ...] = ()
    for attribute in operation.op_def.attr:
        attributes += (attribute.name, operation.get_attr(attribute.name))
    inputs = [*map(tf.constant, values)]
    context = _private("tensorflow.python.eager.context.context")()
    arguments = operation.type, len(operation.outputs), inputs, attributes, context
    results = _private("tensorflow.python.eager.execute.execute", *arguments)(*arguments)
    return [np.asarray(result) for result in results]


def makes_batches(dataset: tf.data.Dataset) -> bool:
    """Returns whether a tf.data.Dataset has batches of examples, not single examples.

    They are if the first axis of every part has an unknown length, and are not if a part has no
    axis or lengths differ. If all have one fixed length (as after `batch(32,
    drop_remainder=True)`), the names of the transformations decide.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    lengths = [spec.shape[0] if spec.shape.rank else 0 for spec in specs]
    if len(set(lengths)) > 1 or lengths[0] == 0:
        return False
    if lengths[0] is None:
        return True
    transformations = [dataset]
    while transformations:
        transformation = transformations.pop()
        kind = type(transformation).__name__.lower()
        if "batch" in kind:
            return "unbatch" not in kind
        transformations += _private("tensorflow.data.Dataset._inputs", owner=transformation)()
    return False


@contextmanager
def losses_reduced_by(
    reduce: Callable[..., Any], parts: Callable[[], int] | None = None
) -> Iterator[None]:
    """Makes Keras's losses combine their values by `reduce`.

    Within the block, `keras.losses.Loss.__call__` calls `reduce(original, values, sample_weight,
    mask, reduction, dtype)`, where `original` is Keras's own function.
    parts: returns the number by which the losses that layers add are divided, instead of the number
        of replicas.
    """
    options = dict.fromkeys(("sample_weight", "mask", "reduction", "dtype"))
    with ExitStack() as stack:
        name = "keras.src.losses.loss.reduce_weighted_values"
        stack.enter_context(wrapped(name, reduce, 0, **options))
        if parts:
            name = "keras.src.losses.loss.scale_loss_for_distribution"
            stack.enter_context(wrapped(name, lambda original, value: value / parts(), 0))

        # The losses of rows, without a reduction, are not divided.
        def unscaled(original: Any, value: Any) -> Any:
            if getattr(value.shape, "rank", 0):
                return value
            return value * parts() if parts else original(value)

        name = "keras.src.losses.loss.unscale_loss_for_distribution"
        stack.enter_context(wrapped(name, unscaled, 0))
        yield


@contextmanager
def metrics_that_run() -> Iterator[list[str]]:
    """Leaves out, in the block, compiled metrics that cannot be computed.

    Yields a list that gets their names.
    """
    omitted = []

    def update_state(original: Any, several: Any, *values: Any, **weights: Any) -> None:
        for metric in several.metrics:
            try:
                metric.update_state(*values, **weights)
            except Exception:
                omitted.append(metric.name)

    name = "keras.src.trainers.compile_utils.MetricsList.update_state"
    with wrapped(name, update_state, None, None, None):
        yield omitted


def cpu_devices_per_worker(count: int) -> AbstractContextManager[None]:
    """Makes a strategy of several workers, created in the block, use `count` CPU devices of each.

    They are logical devices. TensorFlow itself uses one. A count below 2 changes nothing.
    """

    def several(
        original: Any, extended: Any, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker_device}/device:CPU:{index}" for index in range(count)), "CPU"

    name = "tensorflow.python.distribute.collective_all_reduce_strategy.CollectiveAllReduceExtended"
    if count < 2:
        return nullcontext()
    return wrapped(name + "._initialize_local_devices", several, None, None, "")


def parse_profile(content: bytes) -> Any:
    """Returns the XSpace in the content of an xplane.pb file of TensorFlow's profiler."""
    space = _private("tensorflow.tsl.profiler.protobuf.xplane_pb2.XSpace")()
    space.ParseFromString(content)
    return space


@contextmanager
def without_merging(strategy: Any) -> Iterator[None]:
    """Makes each replica update its own variables in the block, as TensorFlow does for XLA on GPUs.

    Elsewhere TensorFlow merges the replicas for an update, which is impossible in a function that
    one of them calls.
    """
    alone = wrapped(
        "tensorflow.distribute.StrategyExtended._use_merge_call",
        lambda original: False,
        owner=strategy.extended,
    )

    def own_value(original: Any, value: Any, aggregation: Any, destinations: Any) -> Any:
        first = aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        return value if first else original(value, aggregation, destinations)

    # TensorFlow would take the first replica's value, as for Keras's counters, and XLA cannot wait
    # for it. The values of all replicas are equal.
    name = "tensorflow.python.distribute.values.apply_aggregation_replica_context"
    with alone, wrapped(name, own_value, None, None, None):
        yield


def _place(name: str, owner: Any) -> tuple[Any, str]:
    """Returns where `name` is looked up (a module, class or object), and its last part."""
    path, _, attribute = name.rpartition(".")
    return pkgutil.resolve_name(path) if owner is None else owner, attribute


def _private(name: str, *arguments: Any, owner: Any = None, **named: Any) -> Any:
    """Looks up `name`, on `owner` if given, and checks that it accepts the arguments, if any.

    Raises Missing if it does not exist or does not accept them.
    """
    try:
        value = getattr(*_place(name, owner))
        if arguments or named:
            with suppress(ValueError):  # a built-in type has no signature
                inspect.signature(value).bind(*arguments, **named)
    except (ImportError, AttributeError, TypeError):
        raise Missing(name) from None
    return value
