"""Tests that only invariance/compat.py uses private names of Keras and TensorFlow, and what happens without them."""

import ast
import importlib
import inspect
import pkgutil
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer
from tests.fixtures import Patch
from trainer.invariance import compat
from trainer.invariance.draws import draw_by_row_everywhere
from trainer.invariance.gradients import sum_first
from trainer.models.optimizers import StepSchedule

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "trainer").rglob("*.py"))
# Of os, of Cloud Storage's client, of argparse, of every NamedTuple.
OTHERS = {"_exit", "_http", "_option_string_actions", "_actions", "_replace"}
PRIVATE = re.compile(r"_[a-z]\w*")  # not __init__, not _


def foreign(dotted: str) -> bool:
    """Returns whether a dotted name is in Keras or TensorFlow, and not of their public modules."""
    root, _, rest = dotted.partition(".")
    parts = rest.split(".")
    hidden = {"src", "python", "core", "compiler", "tsl", "__internal__"} & set(parts) or any(map(PRIVATE.match, parts))
    return root in ("keras", "tensorflow", "tf") and bool(hidden)


LISTED = [*filter(foreign, compat.FACTS)]
METHODS = {
    name
    for kind in (keras.Model, keras.optimizers.Optimizer, keras.Variable, tf.GradientTape, tf.distribute.Strategy)
    for name, value in inspect.getmembers(kind)
    if callable(value)
}


def own_names(source: str) -> set[str]:
    """Returns what `source` defines itself: functions, classes, variables, and what it assigns to self."""
    nodes = list(ast.walk(ast.parse(source)))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return own | {node.attr for node in stored if ast.unparse(node.value) in ("self", "cls")}


OURS = {name for file in FILES for name in own_names(file.read_text(encoding="utf-8"))}


def private_names(source: str) -> Iterator[str]:
    """Yields the private names in `source` that it does not define itself, and private modules of Keras and TensorFlow.

    Also the methods of theirs that it assigns to.

    `self._name` may be that of a base class in another module. Names that collide with those of a base class in Keras
    or TensorFlow are found by `overridden`.
    """
    nodes, own = list(ast.walk(ast.parse(source))), own_names(source) | OTHERS
    for x in (node for node in nodes if isinstance(node, ast.Attribute)):
        text = ast.unparse(x)
        known = own | OURS if text.startswith("self.") else own
        replaces = isinstance(x.ctx, ast.Store) and x.attr in METHODS and not text.startswith("self.")
        if replaces or foreign(text) or (PRIVATE.fullmatch(x.attr) and x.attr not in known):
            yield text
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from filter(foreign, (name.name for name in node.names))
        if isinstance(node, ast.ImportFrom):
            yield from filter(foreign, (f"{node.module}.{name.name}" for name in node.names))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from filter(foreign, re.findall(r"^[\w.]+$", node.value))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            yield from (ast.unparse(x) for x in node.args[1:2] if isinstance(x, ast.Constant) and x.value not in own
                        and PRIVATE.fullmatch(str(x.value)))  # fmt: skip


def overridden(kind: type) -> set[str]:
    """Returns the private names in the code of a class that a base class in Keras or TensorFlow has too."""
    defined = set(vars(kind)) | set(re.findall(r"\bself\.(_\w+)", inspect.getsource(kind)))
    bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] in ("keras", "tensorflow")]
    theirs = {name for base in bases for name in re.findall(r"\b_[a-z]\w*", inspect.getsource(base))}
    return {name for name in defined & theirs if PRIVATE.fullmatch(name)}


def test_private_names_are_used_in_compat_alone() -> None:
    used = {file.relative_to(ROOT).as_posix(): list(private_names(file.read_text(encoding="utf-8"))) for file in FILES}
    del used["trainer/invariance/compat.py"]
    assert {file: names for file, names in used.items() if names} == {}


def test_facts_are_those_that_the_code_relies_on() -> None:
    """Each private name in compat.py and each method that is replaced is one; each is used."""
    sources = {file.name: file.read_text(encoding="utf-8") for file in FILES}
    code = sources["compat.py"] = sources["compat.py"].partition("MESSAGES = {")[2].partition("\n}\n")[2]
    everything = "\n".join(sources.values())
    replaced = re.findall(r"wrap(?:ped)?\(\s*\"([\w.]+)\"", everything)
    lasts = {name.rpartition(".")[2] for name in compat.FACTS}
    assert [name for name in lasts if name not in everything] == []
    used = [name for name in (*private_names(code), *replaced) if name.rpartition(".")[2] not in lasts]
    assert [name for name in used if not any(fact.startswith(name) for fact in compat.FACTS)] == []
    assert [text for text in compat.MESSAGES if text not in re.sub(r"\\(?=[\[(.])", "", everything)] == []


def test_no_class_overrides_a_private_name_of_keras_or_tensorflow() -> None:
    modules = [importlib.import_module(x.name) for x in pkgutil.walk_packages(trainer.__path__, "trainer.")]
    defined = [(x, module.__name__) for module in modules for x in vars(module).values() if inspect.isclass(x)]
    found = [kind for kind, module in defined if kind.__module__ == module]
    assert StepSchedule in found
    assert {kind: names for kind in found if (names := overridden(kind))} == {}


def remove(monkeypatch: Patch, name: str) -> None:
    """Removes a private name from its module, or from its class and the bases of it."""
    path, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(path)
    for one in inspect.getmro(owner) if inspect.isclass(owner) else [owner]:
        if attribute in vars(one):
            monkeypatch.delattr(one, attribute)


def small_model() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(), loss="mse")
    return model


def two_devices_per_worker(nothing: None) -> None:
    with compat.cpu_devices_per_worker(2):
        pass


def in_graph(use: Any) -> Any:
    def within(graph: tf.Graph) -> Any:
        with graph.as_default():
            return use(graph)

    return within


@pytest.mark.parametrize(("last", "prepare", "use"), [
    ("_flatten_layers", small_model, compat.all_layers),
    ("_symbolic_build", small_model, lambda model: compat.build_compiled(model, (np.zeros((1, 2)), np.zeros((1, 1))))),
    ("_all_reduce_sum_gradients", keras.optimizers.SGD, sum_first),
    ("_initialize_local_devices", lambda: None, two_devices_per_worker),
    ("random", lambda: None, lambda nothing: draw_by_row_everywhere()),
    ("reset_uids", lambda: None, lambda nothing: compat.reset_layer_names()),
    ("GraphOrParentsInXlaContext", tf.Graph, in_graph(lambda graph: compat.compiled_by_xla())),
    ("CondBranchFuncGraph", tf.Graph, in_graph(compat.outside_conditions)),
])  # fmt: skip
def test_what_is_missing_fails_in_one_line(monkeypatch: Patch, last: str, prepare: Any, use: Any) -> None:
    use(prepare())
    (name,) = (name for name in LISTED if name.endswith(f".{last}"))
    prepared, owner = prepare(), pkgutil.resolve_name(name.rpartition(".")[0])
    if last == "_symbolic_build":  # has other parameters
        monkeypatch.setattr(owner, last, lambda self, *, other_than_ours: None)
    else:
        remove(monkeypatch, name)
    line = rf"^{re.escape(name)} is missing or has changed in TensorFlow .* with Keras .*: install TensorFlow 2\.20"
    with pytest.raises(RuntimeError, match=line) as caught:
        use(prepared)
    assert "\n" not in str(caught.value)


def test_layers_have_paths_of_their_own() -> None:
    class Own(keras.Model):
        def __init__(self, *parts: keras.layers.Layer, name: str) -> None:
            super().__init__(name=name)
            self.parts = parts

    shared = keras.layers.Dense(1, name="dense")
    parts = [Own(shared, keras.layers.Dense(1, name="dense"), name="part") for _ in range(2)]
    assert list(compat.layers_by_path(Own(*parts, name="model"))) == [
        "model", "model/part", "model/part/dense", "model/part/dense#2", "model/part#2", "model/part#2/dense"
    ]  # fmt: skip


def test_nothing_is_looked_up_for_one_device_per_worker(monkeypatch: Patch) -> None:
    (name,) = (name for name in LISTED if name.endswith("._initialize_local_devices"))
    remove(monkeypatch, name)
    with compat.cpu_devices_per_worker(0), compat.cpu_devices_per_worker(1):
        pass


def test_names_and_seeds_are_those_of_a_new_process() -> None:
    keras.layers.Flatten()
    compat.reset_layer_names()
    keras.utils.set_random_seed(7)
    compat.seed_initializers(7)
    random.random()  # as another thread may draw
    assert [keras.layers.Flatten().name for _ in range(2)] == ["flatten", "flatten_1"]
    assert keras.initializers.GlorotUniform().seed == random.Random(7).randint(1, int(1e9))


def test_a_seed_that_keras_takes_from_elsewhere_is_noticed(monkeypatch: Patch) -> None:
    seeds = pkgutil.resolve_name("keras.src.random.seed_generator")
    monkeypatch.setattr(seeds, "make_default_seed", lambda: random.randint(1, int(1e9)))
    monkeypatch.setattr("keras.src.backend.random.make_default_seed", seeds.make_default_seed)
    with pytest.raises(compat.Missing, match="python_random is missing"):
        compat.seed_initializers(7)


def test_sign_bits_are_those_of_keras(monkeypatch: Patch) -> None:
    module = pkgutil.resolve_name("keras.src.backend.tensorflow.numpy")
    ours = module.signbit
    compat.compare_signs_on_device.__wrapped__()
    assert module.signbit is not ours
    monkeypatch.setattr(module, "signbit", ours)  # in the end
    theirs = inspect.unwrap(ours)
    values = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, np.inf, -np.inf, np.nan, -np.nan]
    for dtype in ("float16", "bfloat16", "float32", "float64", "int32", "bool"):
        x = tf.cast(tf.constant(values[:4] if dtype in ("int32", "bool") else values, tf.float64), dtype)
        np.testing.assert_array_equal(module.signbit(x), theirs(x), err_msg=dtype)
