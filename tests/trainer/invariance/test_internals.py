"""Tests the meaning of all that the package relies on in Keras and TensorFlow beyond their
documentation.

It is the first file to run on a new release (`make test-next`): a test that fails names facts that
no longer hold, and FACTS in trainer/invariance/internals.py says what is wrong without each. It
also tests that these lists are complete.
"""

import importlib
import inspect
import pkgutil
import random
import re
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import (
    Input,
    Model,
    Sequential,
    Variable,
    initializers,
    layers,
    losses,
    metrics,
    ops,
    optimizers,
    regularizers,
    saving,
)
from keras.utils import set_random_seed
from numpy.testing import assert_allclose, assert_array_equal

import trainer
from tests.fixtures import SLOW, Patch, parametrize
from tests.support import slow
from tests.trainer.invariance.test_gradients import make_strategy
from tests.trainer.invariance.test_keras_draws import WORDS, Noisy, independent, on_replica
from tests.workers import ROOT, python
from trainer.invariance import internals
from trainer.invariance.gradients import all_reduce_sum, sum_first, use_averages
from trainer.invariance.losses import reduce_over_replicas
from trainer.models.learning_rates import StepSchedule
from trainer.run.traced_step import OneOfSeveral
from trainer.training.step_operations import flops_of

FILES = sorted((ROOT / "trainer").rglob("*.py"))
KINDS = (
    Model,
    optimizers.Optimizer,
    Variable,
    tf.GradientTape,
    tf.distribute.Strategy,
)
METHODS = {name for kind in KINDS for name, value in inspect.getmembers(kind) if callable(value)}


def test_facts_are_what_the_code_relies_on() -> None:
    """Each name is a fact, each fact is used, no other module replaces a method; `make lint` finds
    private names."""
    sources = {file.name: file.read_text(encoding="utf-8") for file in FILES}
    code = sources["internals.py"] = (
        sources["internals.py"].partition("MESSAGES = {")[2].partition("\n}\n")[2]
    )
    # A text may go on in the next line.
    joined = re.sub(r'"\s+r?"', "", "\n".join(sources.values()))
    everything = re.sub(r"\\(?=[\[(.])", "", joined)
    lasts = {name.rpartition(".")[2] for name in internals.FACTS}
    assert [text for text in (*lasts, *internals.MESSAGES) if text not in everything] == []
    names = re.findall(r"\._[a-z]\w+|(?<=\")(?:keras|tensorflow)\.[\w.]+", code)
    for name in (*names, *re.findall(r'wrap\w*\(\s*"([\w.]+)', everything)):
        assert name.rpartition(".")[2] in lasts or any(
            fact.startswith(name) for fact in internals.FACTS
        ), name
    assignment = re.compile(r"^ +(?!self\.)\w[\w.]*\.(\w+) = ", re.MULTILINE)
    assigned = [
        (file, name) for file, source in sources.items() for name in assignment.findall(source)
    ]
    assert [
        (file, name) for file, name in assigned if name in METHODS and file != "internals.py"
    ] == []


def test_no_class_overrides_a_private_name_of_keras_or_tensorflow() -> None:
    """A private name in the code of a class is none of those in the modules of its bases in Keras
    or TensorFlow."""
    modules = [
        importlib.import_module(x.name) for x in pkgutil.walk_packages(trainer.__path__, "trainer.")
    ]
    members = [
        (module, kind)
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
    ]
    kinds = [kind for module, kind in members if kind.__module__ == module.__name__]
    assert StepSchedule in kinds
    for kind in kinds:
        bases = {
            base.__module__
            for base in kind.__mro__
            if base.__module__.startswith(("keras.", "tensorflow."))
        }
        theirs = "\n".join(
            inspect.getsource(sys.modules[base]) for base in bases if base in sys.modules
        )
        ours = {*vars(kind), *re.findall(r"\bself\.(_\w+)", inspect.getsource(kind))}
        assert ours & set(re.findall(r"\b_[a-z]\w*", theirs)) == set(), kind


def test_what_is_missing_or_has_changed_fails_in_one_line(monkeypatch: Patch) -> None:
    monkeypatch.delattr("keras.src.utils.naming.reset_uids")
    monkeypatch.setattr(Model, "_symbolic_build", lambda self, *, other_than_ours: None)
    # which takes no seed from where Keras took it
    monkeypatch.setattr(initializers, "GlorotUniform", int)
    for name, use in {
        "keras.src.utils.naming.reset_uids": internals.reset_layer_names,
        "keras.Model._symbolic_build": lambda: internals.build_compiled(Sequential(), None),
        "keras.src.random.seed_generator.python_random": lambda: internals.seed_initializers(7),
    }.items():
        line = (
            rf"^{name} is missing or has changed in TensorFlow .* with Keras .*: install TensorFlow"
            r" 2\.20 [^\n]*$"
        )
        with pytest.raises(internals.Missing, match=line):
            use()


TESTED: list[str] = []  # of which each is the end of a fact, or a message


def meaning(*ends: str) -> Any:
    """Notes that a test fails if these facts no longer hold."""
    TESTED.extend(ends)
    return lambda test: test


def on_each(strategy: Any, function: Any) -> list[Any]:
    """Returns what `function(replica's number)` gives on each replica, as arrays."""

    def on_replica() -> Any:
        return function(
            tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        )

    results = tf.function(lambda: strategy.run(on_replica), autograph=False)()
    return [
        tf.nest.map_structure(np.asarray, result)
        for result in strategy.experimental_local_results(results)
    ]


@meaning("reset_uids", "python_random")
def test_names_and_seeds_are_those_of_a_new_process() -> None:
    layers.Flatten()
    internals.reset_layer_names()
    set_random_seed(7)
    internals.seed_initializers(7)
    random.random()  # as another thread may draw
    assert [layers.Flatten().name for _ in range(2)] == ["flatten", "flatten_1"]
    assert initializers.GlorotUniform().seed == random.Random(7).randint(1, int(1e9))


@meaning("tensorflow.random", "Layer.call", "Layer.__dict__")
def test_two_parts_of_a_batch_get_the_noise_of_the_whole() -> None:
    """Without the layer's call, numbers for all rows would be taken for numbers by row."""
    layer = independent(Noisy, WORDS)
    assert [generator.name for generator in layer.seeds] == [layer.name, f"{layer.name}#1"]
    whole, *parts = (
        on_replica(lambda x: layer(x, training=True), WORDS, *part)
        for part in ((8, 0), (4, 0), (4, 1))
    )
    assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-5)


@meaning("numpy.signbit")
def test_keras_argmax_compares_the_same_sign_bits_as_uint32(monkeypatch: Patch) -> None:
    backend = keras.src.backend.tensorflow
    module = getattr(backend, "ops", backend).numpy
    theirs = inspect.unwrap(module.signbit)
    monkeypatch.setattr(module, "signbit", theirs)
    internals.compare_signs_on_device.__wrapped__()
    values = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, np.inf, -np.inf, np.nan, -np.nan]
    for dtype in ("float16", "bfloat16", "float32", "float64", "int32", "bool"):
        x = tf.cast(
            tf.constant(values[:4] if dtype in ("int32", "bool") else values, tf.float64), dtype
        )
        assert_array_equal(module.signbit(x), theirs(x), err_msg=dtype)
    graph = (
        tf.function(ops.argmax, autograph=False).get_concrete_function(tf.TensorSpec((2, 3))).graph
    )
    assert [op.outputs[0].dtype.name for op in graph.get_operations() if op.type == "Bitcast"] == [
        "uint32"
    ]


@meaning(
    "_gradient_function",
    "_default_vspace",
    "TFE_Py_RegisterGradientFunction",
    "TFE_Py_RegisterVSpace",
)
@parametrize("activation", ["relu", "relu6", "leaky_relu"])
def test_a_gradient_of_a_gradient_multiplies_no_zeros_and_has_the_same_bits(
    activation: str, monkeypatch: Patch
) -> None:
    """Through convolutions, pooling and a residual; what TensorFlow leaves out and what it gives as
    zeros stay so."""
    inputs = Input((8, 8, 2))
    first = layers.Conv2D(4, 3, padding="same", activation=activation)(inputs)
    pooled = layers.MaxPooling2D()(first)
    second = layers.Conv2D(4, 3, padding="same", activation=activation)(pooled)
    outputs = layers.Dense(1)(layers.Flatten()(pooled + second))
    model = Model(inputs, outputs)

    def penalty(x: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                scores = model(x)
            loss = tf.reduce_sum(tf.square(inner.gradient(scores, x)))
        return outer.gradient(loss, model.trainable_variables)

    x = tf.random.stateless_normal((3, 8, 8, 2), (1, 2))
    backprop = importlib.import_module("tensorflow.python.eager.backprop")
    wrapper = importlib.import_module("tensorflow.python.pywrap_tfe")
    theirs = inspect.unwrap(backprop._gradient_function)
    monkeypatch.setattr(backprop, "_gradient_function", theirs)
    wrapper.TFE_Py_RegisterGradientFunction(theirs)
    wrapper.TFE_Py_RegisterVSpace(backprop._default_vspace)
    plain = tf.function(penalty, autograph=False)
    expected = plain(x)
    internals.skip_zero_gradients.__wrapped__()
    ours = tf.function(penalty, autograph=False)
    for value, other in zip(ours(x), expected, strict=True):
        assert (value is None) == (other is None)
        if value is not None:
            assert value.numpy().tobytes() == other.numpy().tobytes()
    less, more = (
        flops_of(function.get_concrete_function(x).graph, 3) for function in (ours, plain)
    )
    assert 0 < less < more


@meaning("Layer.add_weight", "__float__", "__int__")
def test_lora_is_float64_and_a_replicated_variable_is_a_number() -> None:
    internals.lora_in_float64()
    internals.floats_of_variables()
    layer = layers.Dense(2, dtype="float64")
    layer.build((None, 3))
    layer.enable_lora(1)
    assert {weight.dtype for weight in layer.weights} == {"float64"}
    with make_strategy(2).scope():
        variable = Variable(2.5)
    assert (float(variable.value), int(variable.value)) == (2.5, 2)


@meaning("_collective_key_base")
def test_a_second_strategy_sums_other_types_in_another_order() -> None:
    for kinds in ((tf.float32, tf.int64), (tf.int64, tf.float64)):
        sums = on_each(
            make_strategy(2),
            lambda replica: all_reduce_sum([tf.constant(replica, x) for x in kinds]),  # noqa: B023
        )
        assert_array_equal(sums, 1)


@meaning("_flatten_layers")
def test_layers_have_paths_of_their_own() -> None:
    class Own(Model):
        def __init__(self, *parts: layers.Layer, name: str) -> None:
            super().__init__(name=name)
            self.parts = parts

    shared = layers.Dense(1, name="dense")
    parts = [Own(shared, layers.Dense(1, name="dense"), name="part") for _ in range(2)]
    assert list(internals.layers_by_path(Own(*parts, name="model"))) == [
        "model",
        "model/part",
        "model/part/dense",
        "model/part/dense#2",
        "model/part#2",
        "model/part#2/dense",
    ]


@meaning("_losses", "_symbolic_build", "compute_metrics", "loss.scale_loss_for_distribution")
@meaning("unscale_loss_for_distribution")
def test_a_compiled_model_is_built_and_its_losses_and_outputs_are_ours() -> None:
    dense = layers.Dense(1, kernel_initializer="ones", activity_regularizer=regularizers.L2(1.0))
    model = Sequential([Input((2,)), dense])
    model.compile(optimizers.Adam(0.0), loss="mse", metrics=["mae"])
    batch = np.ones((1, 2), np.float32), np.zeros((1, 1), np.float32)
    internals.build_compiled(model, batch)
    assert (model.optimizer.built, len(model.metrics_variables)) == (True, 4)
    model(batch[0])
    with internals.losses_kept(internals.all_layers(model)):
        model(3.0 * batch[0])
    assert [float(loss) for loss in model.losses] == [4.0]  # of 1 + 1
    outputs = []
    with internals.wrapped(
        "keras.Model.compute_metrics", lambda _, *given, **named: outputs.extend(given), owner=model
    ):
        model.test_step(batch)
    assert np.asarray(outputs[2]).tolist() == [[2.0]]
    with internals.losses_reduced_by(
        lambda original, *given, **named: original(*given, **named), lambda: 4
    ):
        assert (
            float(model.compute_loss(x=batch[0], y=batch[1], y_pred=model(batch[0])))
            == (4.0 + 4.0) / 4
        )
        assert float(model.train_step(batch)["loss"]) == 8.0


@meaning("reduce_weighted_values")
def test_a_loss_with_weights_is_that_of_all_rows() -> None:
    loss = losses.MeanSquaredError("mean_with_sample_weight")
    weights = np.array([[3.0], [1.0]])
    with internals.losses_reduced_by(reduce_over_replicas):
        parts = on_each(
            make_strategy(2), lambda replica: loss([[0.0]], [[1.0 + replica]], weights[replica])
        )
    assert sum(parts) == (3.0 * 1.0 + 1.0 * 4.0) / 4.0


@meaning("MetricsList.update_state")
def test_a_metric_that_cannot_be_computed_is_left_out() -> None:
    model = Sequential([Input((3,)), layers.Softmax(dtype="float64")])
    model.compile(loss="mse", metrics=["mae", metrics.TopKCategoricalAccuracy(2)])
    with internals.metrics_that_run() as left_out:
        results = model.test_on_batch(np.ones((2, 3)), np.eye(3)[:2], return_dict=True)
    assert {*left_out} == {"top_k_categorical_accuracy"}
    assert float(results["mae"]) == pytest.approx(4 / 9)


@meaning("Optimizer.apply", "_all_reduce_sum_gradients")
@parametrize("mean", [False, True])
def test_gradients_are_summed_once_and_an_overflow_on_one_replica_skips_the_update_on_both(
    mean: bool,
) -> None:
    with (strategy := make_strategy(2)).scope():
        weight = Variable([1.0])
        optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(1.0))
        optimizer.build([weight])
        sum_first(optimizer, mean=mean)
    for gradients in ((0.25, 0.5), (0.25, np.inf), (np.inf, 0.25)):
        scaled = [optimizer.scale_loss(tf.constant([gradient])) for gradient in gradients]
        on_each(strategy, lambda replica: optimizer.apply([scaled[replica]], [weight]))  # noqa: B023
        assert weight.numpy() == 1.0 - (0.25 + 0.5) / (2 if mean else 1)
    assert float(optimizer.dynamic_scale.numpy()) == optimizer.initial_scale / 4


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optimizers.Adam(0.01, beta_1=0.5),
    "adamw": lambda: optimizers.AdamW(optimizers.schedules.CosineDecay(0.01, 9), weight_decay=0.1),
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "nesterov": lambda: optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, use_ema=True, ema_momentum=0.7
    ),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5),
}
AS_KERAS: dict[str, Callable[[], Any]] = {
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "centered": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "without momentum": lambda: optimizers.RMSprop(0.01),
    "subclass": lambda: type("Mine", (optimizers.Adam,), {})(0.01),
}


def trained(make: Callable[[], Any], dtype: str, *, fused: bool) -> tuple[list[Any], set[str]]:
    """Returns variables of an optimizer and weights after some updates, and the operations of
    one."""
    weights = [Variable(np.linspace(-1.0, 1.0, count), dtype=dtype) for count in (2, 5)]
    optimizer = make()
    optimizer.build(weights)
    if fused:
        sum_first(optimizer)
    step = tf.function(
        lambda: optimizer.apply([tf.sin(3.0 * weight.value) for weight in weights], weights)
    )
    for _ in range(5):
        step()
    names = {operation.type for operation in step.get_concrete_function().graph.get_operations()}
    return [variable.numpy() for variable in [*optimizer.variables, *weights]], names


@meaning("update_step", "_get_variable_index", "Adam._momentums", "Adam._velocities")
@meaning("RMSprop._momentums", "RMSprop._velocities")
@parametrize(
    "name, dtype",
    [
        *((name, dtype) for name in OPTIMIZERS for dtype in ("float32", "float64")),
        *((name, "float32") for name in AS_KERAS),
    ],
)
def test_keras_own_optimizers_update_in_one_operation_as_keras_does(name: str, dtype: str) -> None:
    """Adam's operation has 1 - beta_2 of the rounded beta_2, as in its powers; Keras rounds 0.001,
    and float64 too."""
    make = {**OPTIMIZERS, **AS_KERAS}[name]
    (ours, operations), (of_keras, _) = (
        trained(make, dtype, fused=fused) for fused in (True, False)
    )
    assert any(operation.startswith("ResourceApply") for operation in operations) == (
        name in OPTIMIZERS
    )
    tolerance = 2e-5 if name.startswith("adam") else 2e-6
    for variable, other in zip(ours, of_keras, strict=True):
        assert_allclose(variable, other, rtol=tolerance, atol=1e-9)


@meaning("_trainable_variables")
def test_averages_replace_the_weights_that_they_are_of() -> None:
    weights = [Variable([value]) for value in (0.0, 10.0)]
    optimizer = optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    for _ in range(2):
        optimizer.apply([tf.ones(1), tf.ones(1)], weights)
    use_averages(optimizer)
    # of -1 and -2, of 9 and 8
    assert [weight.numpy().tolist() for weight in weights] == [[-1.5], [8.5]]


@meaning("_inputs")
def test_batches_are_told_from_examples() -> None:
    examples = tf.data.Dataset.from_tensor_slices(np.zeros((4, 3)))
    batches = examples.batch(2, drop_remainder=True)
    assert [
        internals.makes_batches(kind)
        for kind in (examples, batches, batches.map(lambda x: x), batches.unbatch())
    ] == [False, True, True, False]


@meaning("_get_function", "GraphOrParentsInXlaContext", "CondBranchFuncGraph")
def test_what_is_traced_inside_of_functions_branches_and_xla_is_known() -> None:
    graphs = []

    def branch(x: Any) -> Any:
        graphs.append(internals.outside_conditions(tf.compat.v1.get_default_graph()))
        return compiled(x)

    compiled = tf.function(
        lambda x: tf.matmul(x, x) + float(internals.compiled_by_xla()),
        jit_compile=True,
        autograph=False,
    )
    outer = tf.function(
        lambda x: compiled(x) + tf.cond(x[0, 0] > 0, lambda: branch(x), lambda: x), autograph=False
    )
    graph = outer.get_concrete_function(tf.TensorSpec((2, 2))).graph
    assert graphs == [graph]
    assert flops_of(graph, 1) == 2 * 2**3  # without branches
    assert (internals.compiled_by_xla(), compiled(tf.ones((2, 2)))[0, 0]) == (False, 3.0)


@meaning("_parse_name")
def test_a_layer_of_a_fixed_dtype_computes_in_float64() -> None:
    with internals.in_float64():
        wide = [
            layers.Dense(1, dtype=of)
            for of in ("float32", "mixed_float16", keras.DTypePolicy("bfloat16"))
        ]
    assert [(of.compute_dtype, of.variable_dtype) for of in wide] == [("float64", "float64")] * 3
    assert layers.Dense(1, dtype="float32").compute_dtype == "float32"


@meaning("execute.execute")
def test_an_operation_of_a_graph_is_run_by_itself() -> None:
    function = tf.function(
        lambda x: tf.split(tf.concat([x, tf.range(2)], 0), 2)
    ).get_concrete_function(tf.TensorSpec((2,), tf.int32))
    joins, splits = (
        next(operation for operation in function.graph.get_operations() if operation.type == kind)
        for kind in ("ConcatV2", "Split")
    )
    (joined,) = internals.run_operation(joins, [[7, 8], [0, 1], 0])
    assert [part.tolist() for part in internals.run_operation(splits, [0, joined])] == [
        [7, 8],
        [0, 1],
    ]


@meaning("_use_merge_call", "apply_aggregation_replica_context")
def test_xla_compiles_a_replicas_update() -> None:
    with (strategy := make_strategy(2)).scope():
        weight = Variable([1.0])
        optimizer = optimizers.Adam(0.1)
        optimizer.build([weight])
        internals.disable_gradient_sum(optimizer)

    def update(replica: int) -> None:
        with internals.without_merging(strategy):
            tf.function(
                lambda: optimizer.apply([tf.ones(1)], [weight]), jit_compile=True, autograph=False
            )()

    on_each(strategy, update)
    assert (int(optimizer.iterations.value.numpy()), weight.numpy()) == (
        1,
        pytest.approx(0.9, rel=1e-5),
    )


@meaning("IsMklEnabled", "XSpace")
def test_the_processors_kernels_are_known_and_a_profile_is_read(tmp_path: Path) -> None:
    """TensorFlow measures the memory of a CPU with oneDNN alone."""
    with nullcontext() if internals.uses_onednn() else pytest.raises(ValueError, match="stats"):
        tf.config.experimental.get_memory_info("CPU:0")
    with tf.profiler.experimental.Profile(str(tmp_path)):
        tf.matmul(tf.ones((2, 2)), tf.ones((2, 2)))
    (file,) = tmp_path.rglob("*.xplane.pb")
    names = [
        event.name
        for plane in internals.parse_profile(file.read_bytes()).planes
        for event in plane.event_metadata.values()
    ]
    assert any("MatMul" in name for name in names)


WORKER = """
import sys
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from trainer.invariance import internals
internals.await_silent_workers(70)
cluster = tf.train.ClusterSpec({"worker": [sys.argv[1]]})
SimpleClusterResolver = tf.distribute.cluster_resolver.SimpleClusterResolver
resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=0)
with internals.cpu_devices_per_worker(2):
    strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
def sum_of_numbers():
    replica = tf.distribute.get_replica_context()
    return replica.all_reduce("SUM", tf.cast(1 + replica.replica_id_in_sync_group, tf.float32))
total = strategy.run(sum_of_numbers)
service = internals._private("tensorflow.python.eager.context.context")().coordination_service
totals = [float(part) for part in strategy.experimental_local_results(total)]
print(totals, service.heartbeat_timeout_in_ms)
"""


@SLOW  # a process of TensorFlow
@meaning("_initialize_local_devices", "context.context", "configure_coordination_service")
def test_a_worker_has_several_devices_and_waits_for_silent_ones() -> None:
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    assert python("-c", WORKER, address).stdout.endswith("[3.0, 3.0] 70000\n")


FAILURES: dict[str, Any] = {
    "Received a label value of": lambda: tf.nn.sparse_softmax_cross_entropy_with_logits(
        [9], [[0.0, 1.0]]
    ),
    "is not in [0, ": lambda: tf.gather(tf.zeros(2), [5]),
    "was expected to be a float tensor but is a double": lambda: tf.raw_ops.AddV2(
        x=tf.zeros(1), y=tf.zeros(1, "double")
    ),
    "type float32 that does not match type float64": tf.function(
        lambda: tf.raw_ops.AddV2(x=tf.zeros(1, "double"), y=tf.zeros(1))
    ),
    "[Op:": lambda: tf.gather(tf.zeros(2), [5]),
    "numpy() is only available when eager execution is enabled": tf.function(
        lambda: tf.Variable(1.0).numpy()
    ),
    "in user code:": tf.function(lambda: int("a")),
    "Exception encountered when calling": lambda: layers.Lambda(lambda x: x + tf.zeros(3))(
        tf.zeros(2)
    ),
    "incompatible with the layer": lambda: layers.LSTM(1)(tf.zeros(2)),
    "Detected unsupported operations": tf.function(
        lambda: tf.unique_with_counts(tf.zeros(2)), jit_compile=True
    ),
    "Could not locate ": lambda: saving.deserialize_keras_object(
        {"module": "nowhere", "class_name": "Nothing", "registered_name": "Nothing", "config": {}}
    ),
    "not compatible with expected shape": lambda: tf.ensure_shape(tf.zeros(2), (3,)),
    "OOM when allocating": lambda: tf.zeros(2**45),
}


@meaning(*FAILURES)
@parametrize(
    "text",
    [
        # it waits ten seconds
        *list(FAILURES)[:-1],
        slow("OOM when allocating"),
    ],
)
def test_errors_are_told_apart_by_their_texts(text: str) -> None:
    with pytest.raises(Exception, match=re.escape(text)):
        FAILURES[text]()


METHODS_OF_MODELS = [
    *("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"),
    *("save", "save_weights", "export"),
]


@meaning(*(f"keras.Model.{name}" for name in METHODS_OF_MODELS))
@parametrize("name", METHODS_OF_MODELS)
def test_models_of_all_classes_have_a_replaced_method(name: str) -> None:
    model = type("Own", (Sequential,), {})([layers.Dense(1)])
    with internals.wrapped(f"keras.Model.{name}", lambda original, model, x: (model, x)):
        assert getattr(model, name)(3) == (model, 3)
    assert "wrapped" not in repr(getattr(model, name))


@meaning("eager_mode")
def test_no_scope_of_a_strategy_reaches_into_a_block_outside_of_scopes() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        with internals.outside_of_scopes():
            assert not tf.distribute.has_strategy()
            assert tf.executing_eagerly()
            assert not hasattr(tf.Variable(1.0), "values")
        assert hasattr(tf.Variable(1.0), "values")


@meaning(
    "Variable._value",
    "Variable._initialize",
    "Variable._unique_id",
    "Optimizer._distribution_strategy",
)
def test_an_optimizer_updates_the_plain_values_of_variables_alone() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        weight = Variable([3.0])
        optimizer = optimizers.SGD(1.0, momentum=0.5)
        optimizer.build([weight])
    with internals.plain_variables([weight, *optimizer.variables], [optimizer]):
        for _ in range(2):
            OneOfSeveral(2).run(optimizer.apply, args=([tf.ones(1)], [weight]))
        assert weight.numpy().tolist() == [0.5]
        optimizer.apply([tf.ones(1)], [weight])  # on one device, of no strategy
        assert weight.numpy().tolist() == [-1.25]
    assert weight.numpy().tolist() == [3.0]
    assert optimizer.iterations.numpy() == 0


def test_each_fact_has_a_test_of_its_meaning() -> None:
    relied_on = {**internals.FACTS, **internals.MESSAGES}
    assert [fact for fact in relied_on if not fact.endswith(tuple(TESTED))] == []
    assert [end for end in TESTED if not any(fact.endswith(end) for fact in relied_on)] == []
