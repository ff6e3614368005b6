"""Tests what checkpoints hold, which are kept, and what happens if one is damaged or cannot be
written."""

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, Sequential, layers
from keras.models import load_model
from keras.utils import set_random_seed
from numpy.testing import assert_allclose, assert_array_equal

from tests.fixtures import Folders, Log, Make, Patch, parametrize
from tests.step_memory import counted
from tests.support import (
    largest_difference,
    prepared,
    refused,
    saved_model,
    tiny,
    weights,
)
from tests.support import run_job as run
from trainer.base.errors import NotFinite
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.training import checkpoint
from trainer.training.checkpoint import (
    Checkpoints,
    checkpoint_folders,
    read_checkpoint,
    variables_of,
)

FILES = ("manifest.json", "variables.index", "variables.data-00000-of-00001")


def small_model(seed: int = 1) -> Model:
    """Returns a model with weights, random state (Dropout) and an optimizer with momentum."""
    set_random_seed(seed)
    model = Sequential([Input((3,)), layers.Dropout(0.5), layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    model.helper = optimizer
    return model


@pytest.fixture
def model() -> Model:
    return small_model()


def checkpoints_of(model: Model, folder: Path, keep: int = 3) -> Checkpoints:
    return Checkpoints(model, make_replicas(TrainConfig()), folder, keep)


def fill(model: Model, value: float) -> None:
    for variable in model.trainable_variables:
        variable.assign(tf.fill(variable.shape, value))


_SNAPSHOT = """
import tensorflow as tf
from trainer.training.checkpoint import snapshot
state = tf.Variable(tf.zeros((4 * 2**20,)))  # 16 MiB
gradient = tf.ones(state.shape)
tf.config.experimental.reset_memory_stats("CPU:0")
before = tf.config.experimental.get_memory_info("CPU:0")["peak"]
kept = snapshot({"weight": state})
tf.raw_ops.ResourceApplyGradientDescent(var=state.handle, alpha=1.0, delta=gradient)
peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
assert (kept["weight"].max(), state.numpy().max()) == (0.0, -1.0)
print(peak - before)
"""


@pytest.mark.processor
def test_a_snapshot_does_not_hold_the_state_twice_on_the_device() -> None:
    """Counts what TensorFlow's allocator holds at most while a snapshot is kept and the next step
    updates in place."""
    assert counted("-c", _SNAPSHOT) < 2**20


def save(checkpoints: Checkpoints, model: Model, *steps: int, **state: Any) -> None:
    """Checkpoints in which every weight is the step."""
    for step in steps:
        fill(model, float(step))
        checkpoints.save(step, {"of": step, **state})
        checkpoints.wait()


def names(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoint_folders(folder)]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@parametrize("name", FILES)
@parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_file_is_named_and_the_one_before_is_taken(
    tmp_path: Path, model: Model, caplog: Log, name: str, damage: Callable[[Path], None]
) -> None:
    save(checkpoints_of(model, tmp_path), model, 2, 4)
    damage(tmp_path / "step-00000004" / name)
    fill(model, -1.0)
    restored = checkpoints_of(model, tmp_path).restore()
    assert restored == (2, {"of": 2})
    assert all(np.all(np.asarray(variable) == 2.0) for variable in model.trainable_variables)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"step-00000004/{name}" in line


def test_without_a_usable_checkpoint_nothing_is_overwritten(tmp_path: Path, model: Model) -> None:
    save(checkpoints_of(model, tmp_path), model, 2, 4)
    for folder in checkpoint_folders(tmp_path):
        truncate(folder / FILES[2])
    before = contents(tmp_path)
    with refused("none of its checkpoints can be read (step-00000004/variables.data"):
        checkpoints_of(model, tmp_path).restore()
    assert contents(tmp_path) == before


def test_what_a_kill_left_half_written_is_no_checkpoint_and_is_swept_away(
    tmp_path: Path, model: Model
) -> None:
    save(checkpoints_of(model, tmp_path), model, 2)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / ".step-00000004.part")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / ".step-00000003.old")
    checkpoints = checkpoints_of(model, tmp_path)
    assert checkpoints.restore() == (2, {"of": 2})
    save(checkpoints, model, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000005"]


def test_weights_momentum_and_random_state_come_back(tmp_path: Path, model: Model) -> None:
    inputs = tf.ones((4, 3))
    for _ in range(3):
        model(inputs, training=True)
        model.helper.apply(
            [tf.ones(v.shape) for v in model.trainable_variables], model.trainable_variables
        )
    save(checkpoints_of(model, tmp_path), model, 3)
    other = small_model(seed=2)
    assert checkpoints_of(other, tmp_path).restore() == (3, {"of": 3})
    ours = variables_of(model)
    theirs = variables_of(other)
    assert ours.keys() == theirs.keys()
    assert {name.rpartition("/")[2] for name in ours} >= {
        "kernel",
        "bias",
        "state",
        "momentum",
        "iteration",
    }
    for name, variable in ours.items():
        assert_array_equal(variable, theirs[name], err_msg=name)
    assert_array_equal(model(inputs, training=True), other(inputs, training=True))


class _Holder:
    """Is no object that TensorFlow or Keras tracks."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.me = self


@parametrize("hold", [lambda x: [x], lambda x: {"a": (x,)}, _Holder, lambda x: [_Holder({"b": x})]])
def test_optimizers_and_variables_in_containers_and_plain_objects_count(
    hold: Callable[[Any], Any],
) -> None:
    plain = set(variables_of(small_model()))
    model = small_model()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.more = hold(optimizer)
    model.counter = hold(tf.Variable(1.0, name="counter"))
    optimizer.build(model.trainable_variables)
    kinds = sorted(name.rpartition("/")[2] for name in set(variables_of(model)) - plain)
    assert kinds == ["counter", "iteration", *["momentum"] * len(model.trainable_variables)]


def test_the_newest_and_the_best_are_kept_and_a_damaged_newest_one_does_not_crowd_them_out(
    tmp_path: Path, model: Model
) -> None:
    save(checkpoints_of(model, tmp_path, keep=2), model, 1, 2, 3, 4, 6, best={"step": 2})
    assert names(tmp_path) == [2, 4, 6]
    truncate(tmp_path / "step-00000006" / FILES[1])
    checkpoints = checkpoints_of(model, tmp_path, keep=1)
    assert checkpoints.restore() == (4, {"of": 4, "best": {"step": 2}})
    save(checkpoints, model, 5)
    assert names(tmp_path) == [5]
    assert checkpoints_of(model, tmp_path).restore() == (5, {"of": 5})


def test_a_step_with_pending_hooks_is_written_again_when_they_have_run(
    tmp_path: Path, model: Model
) -> None:
    save(checkpoints_of(model, tmp_path), model, 3, pending=True)
    checkpoints = checkpoints_of(model, tmp_path)
    assert checkpoints.restore() == (3, {"of": 3, "pending": True})
    before = contents(tmp_path)
    save(checkpoints, model, 3, pending=True)
    assert contents(tmp_path) == before
    save(checkpoints, model, 3, pending=False)
    assert checkpoints_of(model, tmp_path).restore() == (3, {"of": 3, "pending": False})
    assert names(tmp_path) == [3]


def test_the_background_writes_the_state_of_the_save(
    tmp_path: Path, model: Model, monkeypatch: Patch
) -> None:
    """Changes weights and state before the writer starts."""
    may_write = threading.Event()
    write = checkpoint.write_checkpoint

    def late(*given: Any) -> None:
        may_write.wait(30)
        write(*given)

    monkeypatch.setattr(checkpoint, "write_checkpoint", late)
    step = tf.function(
        lambda: model.helper.apply([tf.ones(v.shape) for v in model.trainable_variables])
    )
    step()
    before = weights(model)
    state = {"list": [1]}
    checkpoints = checkpoints_of(model, tmp_path)
    checkpoints.save(1, state)
    state["list"].append(2)
    for _ in range(3):
        step()
    may_write.set()
    checkpoints.wait()
    assert largest_difference(before, weights(model)) > 0.1
    assert checkpoints_of(model, tmp_path).restore() == (1, {"list": [1]})
    assert largest_difference(before, weights(model)) == 0.0


def test_a_failed_write_is_raised_once_and_changes_nothing(
    tmp_path: Path, model: Model, monkeypatch: Patch
) -> None:
    checkpoints = checkpoints_of(model, tmp_path)
    save(checkpoints, model, 1)

    def full(path: Path, content: Mapping[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_json", full)
        checkpoints.save(2, {})
        with refused("step-00000002 cannot be written: No space left on device: free"):
            checkpoints.save(3, {})
    checkpoints.wait()
    assert names(tmp_path) == [1]
    assert not list(tmp_path.glob(".*"))


def test_a_state_with_nan_is_not_kept(tmp_path: Path, model: Model) -> None:
    checkpoints = checkpoints_of(model, tmp_path)
    save(checkpoints, model, 1)
    fill(model, float("nan"))
    checkpoints.save(2, {})
    with pytest.raises(
        NotFinite, match="step 2: model/0000/kernel is NaN or infinite: lower learning_rate"
    ):
        checkpoints.wait()
    assert names(tmp_path) == [1]


MLP = ("--model=mlp", "--global_batch_size=64")
KINDS = {"GAN": ("--model=dcgan",), "classifier": MLP}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Folders) -> dict[str, Path]:
    """Holds a finished run of each kind."""
    folder = tmp_path_factory.mktemp("trained")
    return {kind: run(tiny(f"--job_dir={folder / kind}", *flags)) for kind, flags in KINDS.items()}


@parametrize(
    "kind, where",
    [("GAN", ""), ("classifier", "checkpoints"), ("classifier", "checkpoints/step-00000004")],
)
def test_initial_checkpoint_sets_the_weights(
    kind: str, where: str, small_config: Make, trained: dict[str, Path]
) -> None:
    begun = prepared(
        small_config(
            *KINDS[kind], f"--initial_checkpoint={trained[kind] / where}", "--learning_rate=0.5"
        )
    )
    assert begun.state.progress.step == 0
    _, values = read_checkpoint(trained[kind] / "checkpoints" / "step-00000004")
    for name, variable in variables_of(begun.setup.model).items():
        if name.startswith("model/"):
            assert_array_equal(variable, values[name], err_msg=name)
    optimizers = [
        v for name, v in variables_of(begun.setup.model).items() if name.endswith("iteration")
    ]
    assert [int(np.asarray(variable)) for variable in optimizers] == [0] * len(optimizers)


@parametrize("kind", KINDS)
def test_initial_model_sets_the_weights_of_templates(
    small_config: Make, trained: dict[str, Path], kind: str
) -> None:
    model = prepared(
        small_config(*KINDS[kind], f"--initial_model={trained[kind]}/model/model.keras")
    ).setup.model
    networks = model.templates() if kind == "GAN" else {"model": model}
    for name, network in networks.items():
        saved = load_model(trained[kind] / "model" / f"{name}.keras", compile=False)
        assert largest_difference(network, saved) == 0.0


def test_the_jobs_own_checkpoint_comes_before_another_runs(
    small_config: Make, trained: dict[str, Path]
) -> None:
    run(small_config("--steps=2"))
    assert (
        prepared(
            small_config("--steps=6", f"--initial_checkpoint={trained['classifier']}")
        ).state.progress.step
        == 2
    )


@parametrize(
    "flags, line",
    [
        (["--initial_checkpoint={GAN}", "--width=8"], "it is of another model"),
        (["--initial_checkpoint={classifier}"], "it is of another model"),
        (["--initial_checkpoint={GAN}/samples"], "no checkpoint found: use a job directory"),
        (["--initial_checkpoint=/nowhere"], "no checkpoint found: use a job directory"),
        (
            ["--initial_model={GAN}/model/model.keras", "--width=8"],
            "its weights do not fit this model",
        ),
        (["--initial_model={classifier}/model/model.keras"], "its weights do not fit this model"),
        (["--initial_model={GAN}/run.json"], "Keras cannot load it"),
        (["--initial_model=/nowhere"], "Keras cannot load it"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_first_weights_that_do_not_fit_are_refused_in_one_line(
    small_config: Make, trained: dict[str, Path], flags: list[str], line: str
) -> None:
    places = {kind: str(folder) for kind, folder in trained.items()}
    with refused(line):
        prepared(small_config(*KINDS["GAN"], *(flag.format(**places) for flag in flags)))


def schedule_free(config: Any, dataset: Any) -> Model:
    """Its optimizer copies the weights when it is built, and so does any Lookahead of a user."""
    model = Sequential([Input((4,)), layers.Dense(3), layers.Dense(1)])
    model.compile(keras.optimizers.ScheduleFreeAdamW(1e-9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_an_optimizer_that_copied_the_weights_gets_the_loaded_ones(
    small_config: Make, tmp_path: Path
) -> None:
    own = (
        f"--model={__name__}:schedule_free",
        "--data=tests.own_data:arrays",
        "--precision=float64",
        "--steps=1",
    )
    start = schedule_free(None, None)
    start.set_weights([weight + 1 for weight in start.get_weights()])
    start.save(tmp_path / "start.keras")
    folder = run(small_config(*own, f"--initial_model={tmp_path / 'start.keras'}"))
    trained = saved_model(folder)
    for before, after in zip(start.get_weights(), trained.get_weights(), strict=True):
        assert_allclose(after, before, atol=1e-5)
