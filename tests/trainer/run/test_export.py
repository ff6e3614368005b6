"""Tests that the saved files hold the plain template model, which loads without this package."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, Sequential, layers, losses, metrics, ops, optimizers, saving
from keras.models import load_model
from numpy.testing import assert_allclose

from tests import own_data
from tests.fixtures import SLOW, Capture, Folders, Log, Make, Patch, parametrize
from tests.support import refused, resolved, run_job, run_steps, slow, tiny
from tests.workers import python
from trainer import evaluate, generate, predict
from trainer.base.run_files.serving_file import fetch_model
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.data.dataset import Dataset
from trainer.data.sample_grids import noise
from trainer.invariance.internals import separate_collectives
from trainer.run import served_model
from trainer.run.export import export, plain_copy
from trainer.run.rehearsal import rehearse
from trainer.run.training_setup import build_setup

READER = """
import json, sys
import keras, numpy as np, tensorflow as tf
folder = sys.argv[1]
z = tf.constant(np.load(folder + "/noise.npy"))
keras_model = keras.models.load_model(folder + "/model.keras")
h5_model = keras.models.load_model(folder + "/model.h5", compile=False)
served = tf.saved_model.load(folder + "/saved_model")
np.savez(
    folder + "/read.npz",
    keras=keras_model(z), h5=h5_model(z), served=served.serve(z),
    signature=served.signatures["serving_default"](z)["output_0"],
    critic=keras.models.load_model(folder + "/critic.keras")(keras_model(z)),
    raw=keras.models.load_model(folder + "/generator_raw.keras")(z),
)
norms = [x for x in keras_model.layers if isinstance(x, keras.layers.BatchNormalization)]
sync = [layer.synchronized for layer in norms]
print(json.dumps({"trainer": "trainer" in sys.modules, "sync": sync}))
"""

pytestmark = pytest.mark.exports


@SLOW
def test_a_process_without_this_package_loads_it(tmp_path: Path, small_config: Make) -> None:
    model, _ = run_steps(
        small_config("--model=wgan_gp", "--replicas=2", "--precision=mixed_bfloat16"), 4
    )
    folder = tmp_path / "model"
    export(model, folder, tf.TensorSpec((None, 16, 16, 1)))
    z = noise(5, 16, model.latent_dim)
    np.save(folder / "noise.npy", z)

    # -I: neither this folder nor PYTHONPATH, so that `trainer` cannot be imported by accident
    shown = python("-I", "-c", READER, str(folder))
    assert json.loads(shown.stdout.splitlines()[-1]) == {"trainer": False, "sync": [False, False]}

    keras.config.set_dtype_policy("float32")
    expected = plain_copy(model.averaged_generator())(z).numpy()
    with np.load(folder / "read.npz") as read:
        assert_allclose(read["keras"], expected, atol=1e-6)
        assert_allclose(read["h5"], expected, atol=1e-6)
        assert_allclose(read["critic"], plain_copy(model.critic)(expected), atol=1e-5)
        assert_allclose(read["raw"], plain_copy(model.generator)(z), atol=1e-6)
        assert read["served"].dtype == np.uint8
        assert np.array_equal(read["served"], read["signature"])
        assert np.abs((expected + 1) * 127.5 - read["served"]).max() <= 1
    # The copy computes what the trained model computes, within its precision.
    assert_allclose(expected, model.averaged_generator()(z), atol=0.05)


def test_an_export_replaces_the_old_one_whole_or_leaves_it(
    tmp_path: Path, small_config: Make
) -> None:
    model, _ = run_steps(small_config(), 0)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "left_over").write_text("")
    export(model, folder, tf.TensorSpec((None, 16, 16, 1)))
    assert not (folder / "left_over").exists()
    assert [*tmp_path.iterdir()] == [folder]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    model.serve = lambda outputs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        export(model, folder, tf.TensorSpec((None, 16, 16, 1)))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_model_with_a_model_inside_becomes_plain_too(tmp_path: Path) -> None:
    separate_collectives()
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        norm = layers.BatchNormalization(synchronized=True)
        inner = Sequential([Input((3,)), layers.Dense(3), norm])
        model = Model(inputs := Input((3,)), layers.Dense(2)(inner(inputs)))
    export(model, tmp_path / "model", tf.TensorSpec((None, 16, 16, 1)))
    loaded = load_model(tmp_path / "model" / "model.keras")
    x = np.ones((2, 3), np.float32)
    assert_allclose(loaded(x), model(x), atol=1e-6)
    assert loaded.layers[1].layers[-1].synchronized is False


@saving.register_keras_serializable("tests")
class Coded(layers.Layer):
    """Holds a layer with a vocabulary, which it learns when it is made."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.codes = layers.StringLookup()
        self.adapt = self.codes.adapt

    def build(self, shape: Any) -> None:
        self.built = True

    def call(self, words: Any) -> Any:
        return ops.one_hot(self.codes(words), 6)


TEXTS = ["win", "cash", "now", "home"]
VOCABULARIES: dict[str, Callable[[], layers.Layer]] = {
    "tf_idf": lambda: layers.TextVectorization(output_mode="tf_idf"),
    "numbers": lambda: layers.IntegerLookup(output_mode="one_hot"),
    "a layer within a layer": Coded,
}


@parametrize("kind", VOCABULARIES)
def test_a_vocabulary_is_saved_with_the_model(kind: str, tmp_path: Path, caplog: Log) -> None:
    layer = VOCABULARIES[kind]()
    x = tf.constant([3, 4] if kind == "numbers" else TEXTS)
    layer.adapt(x)
    inner = Sequential([Input((), dtype=x.dtype.name), layer])
    model = Model(inputs := Input((), dtype=x.dtype.name), layers.Dense(2)(inner(inputs)))
    export(model, tmp_path / "model", None)
    loaded = load_model(tmp_path / "model" / "model.keras")
    served = tf.saved_model.load(str(tmp_path / "model" / "saved_model"))
    assert len(np.unique(model(x), axis=0)) == len(x)
    assert_allclose(loaded(x), model(x), atol=1e-6)
    assert_allclose(served.serve(x), model(x), atol=1e-6)
    assert "model.h5 is not written: HDF5 cannot hold a vocabulary" in caplog.text
    assert not (tmp_path / "model" / "model.h5").exists()


class Unregistered(layers.Layer):
    def call(self, values: Any) -> Any:
        return values


def unregistered(config: TrainConfig, dataset: Dataset) -> Model:
    stack = [Input(dataset.spec[0].shape), Unregistered(), layers.Dense(1)]
    return own_data._compiled(Sequential(stack), config, loss="mean_squared_error")


@parametrize("lost", ["vocabulary", "class"])
def test_an_export_that_cannot_be_loaded_is_told_before_training(
    lost: str, monkeypatch: Patch, caplog: Log
) -> None:
    model, data = {
        "vocabulary": ("tests.own_data:bag_of_words", "sentences"),
        "class": ("tests.trainer.run.test_export:unregistered", "arrays"),
    }[lost]
    config = resolved(f"--model={model}", f"--data=tests.own_data:{data}", "--global_batch_size=8")
    setup = build_setup(config, make_replicas(config))
    rehearse(setup, None)
    line = (
        "model.keras: Keras cannot load it: Could not locate class 'Unregistered': register its"
        " classes"
    )
    assert (line in caplog.text) is (lost == "class")
    if lost == "vocabulary":
        monkeypatch.setattr("trainer.run.export._copy_learnt", lambda trained, plain: None)
        with refused("its export fails, tried before training: "):
            rehearse(setup, None)
        lines = {id(one) for one in caplog.records if "model.h5 is not written" in one.getMessage()}
        # although it was exported twice; another test may make pytest see each line twice
        assert len(lines) == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Folders) -> Path:
    return run_job(tiny("--model=dcgan", f"--job_dir={tmp_path_factory.mktemp('job')}"))


def test_a_run_and_its_model_generate_the_same_images(trained: Path, tmp_path: Path) -> None:
    """On GPUs too, as nothing is computed in TensorFloat-32."""
    tf.config.experimental.enable_tensor_float_32_execution(True)
    pictures = []
    for name in ("", "model"):
        out = tmp_path / "new" / "grid.png"
        run = trained / name
        assert generate.main([str(run), "--count=6", "--seed=3", f"--out={out}"]) == 0
        pictures.append(tf.io.decode_png(out.read_bytes()).numpy())
    assert not tf.config.experimental.tensor_float_32_execution_enabled()
    assert pictures[0].shape == (2 * 66 + 2, 3 * 66 + 2, 1)
    for picture in pictures[1:]:
        assert np.abs(picture.astype(int) - pictures[0]).max() <= 1


def test_many_images_are_generated_some_at_a_time(trained: Path) -> None:
    generator = served_model.ServedModel(trained / "model", "run")
    drawn = noise(3, 300, 8)
    together = generator.images(drawn)
    parts = [generator.images(drawn[at : at + 150]) for at in (0, 150)]
    assert np.abs(together.astype(int) - np.concatenate(parts)).max() <= 1


@parametrize("name", ["", "model", "model/model.keras"])
def test_a_saved_model_is_found_below_its_job_directory(trained: Path, name: str) -> None:
    assert fetch_model(str(trained / name), "initial_model") == trained / "model" / "model.keras"


def test_what_is_no_generator_or_no_place_to_write_is_told(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "notes.txt").write_text("")
    export(Sequential([Input((3,)), layers.Dense(2)]), tmp_path / "model", None)
    for run, out, line in (
        (
            "nothing",
            "notes.txt/grid.png",
            f"out={tmp_path / 'notes.txt'}: cannot write there (not a folder)",
        ),
        ("nothing", "grid.png", "nothing: there is no serving.json"),
        ("", "grid.png", "its model is no generator, which maps noise to images"),
    ):
        assert generate.main([str(tmp_path / run), f"--out={tmp_path / out}"]) == 2
        assert line in capsys.readouterr().err


def autoencoder(config: TrainConfig, dataset: Dataset) -> Model:
    """Shares the outer input with a network within it."""
    inputs = Input((4,))
    code = Input((2,))
    encoder = Model(inputs, layers.Dense(2)(inputs), name="encoder")
    decoder = Model(code, layers.Dense(4)(code), name="decoder")
    model = Model(inputs, decoder(encoder(inputs))[:, 0])
    model.compile("adam", "mse")
    return model


class Unsaved(Model):
    """Has an argument of `__init__` that Keras cannot save."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.first = layers.Dense(3)
        self.last = layers.Dense(1)
        self.activation = activation

    def call(self, x: Any) -> Any:
        return self.last(self.activation(self.first(x)))[:, 0]


def unsaved(config: TrainConfig, dataset: Dataset) -> Model:
    model = Unsaved(lambda x: ops.tanh(x))
    model.compile("adam", "mse")
    return model


@parametrize("model, file", [("unsaved", "model.weights.h5"), slow("autoencoder", "model.keras")])
def test_models_that_fit_trains_are_exported_and_used(
    model: str, file: str, tmp_path: Path, caplog: Log
) -> None:
    run = run_job(
        resolved(
            f"--model={__name__}:{model}",
            "--data=tests.own_data:pair",
            "--steps=3",
            "--global_batch_size=16",
            "--replicas=2",
            f"--job_dir={tmp_path / 'run'}",
        )
    )
    assert (run / "model" / file).is_file()
    final = json.loads((run / "result.json").read_text())["final"]
    values = tmp_path / "values.json"
    assert evaluate.main([str(run), "--replicas=1", f"--out={values}"]) == 0
    assert ("model.keras is not written: " in caplog.text) == (model == "unsaved")
    assert json.loads(values.read_text())["values"]["loss"] == pytest.approx(
        {**final, **final.get("evaluation", {})}["losses"]["val_loss"], rel=1e-4
    )
    assert (
        predict.main(
            [str(run), "--replicas=1", "--data=tests.own_data:more", f"--out={tmp_path / 'x.npz'}"]
        )
        == 0
    )
    assert np.load(tmp_path / "x.npz")["predictions"].shape == (11,)


COMPILED = """
import sys, warnings
import keras, numpy as np
warnings.simplefilter("error")
folder, told = sys.argv[1], sys.argv[2] == "told"
with warnings.catch_warnings(record=True) as lines:
    warnings.simplefilter("always")
    model = keras.models.load_model(f"{folder}/model.keras")
assert bool(lines) is told, [str(line.message) for line in lines]
x = np.ones((4, 4))
values = model.evaluate(x, x[:, 0], verbose=0)
print(*(f"{value:.9g}" for value in values), int(model.optimizer.iterations))
model.fit(x, x[:, 0], verbose=0)
keras.models.load_model(f"{folder}/model.h5", compile=False)
"""


def of_keras(config: TrainConfig, dataset: Dataset) -> Model:
    """Is compiled with a loss, a metric and an optimizer of Keras, each in another form."""
    model = Sequential([Input((4,)), layers.Dense(1), layers.Reshape(())])
    rate = optimizers.schedules.CosineDecay(0.01, 100)
    model.compile(
        optimizers.Adam(rate),
        losses.mean_squared_error,
        metrics=[metrics.MeanAbsoluteError()],
    )
    return model


def of_user(config: TrainConfig, dataset: Dataset) -> Model:
    model = of_keras(config, dataset)
    model.compile("sgd", lambda y, p: ops.mean((y - p) ** 2, axis=-1))
    return model


def unbuilt(config: TrainConfig, dataset: Dataset) -> Model:
    model = Sequential([layers.Dense(1), layers.Reshape(())])
    model.compile("sgd", "mse")
    return model


def exported(model: str, folder: Path, *flags: str) -> tuple[Path, Any]:
    """Returns the exported files and the model of three steps on two replicas."""
    own = [
        f"--model={__name__}:{model}",
        "--data=tests.own_data:arrays",
        "--global_batch_size=8",
        "--replicas=2",
    ]
    trained, _ = run_steps(config := resolved(*own, *flags), 3)
    export(trained, folder, None, save_optimizer=config.save_optimizer)
    return folder, trained


def test_a_sequential_without_an_input_takes_any_number_of_rows(tmp_path: Path) -> None:
    folder, _ = exported("unbuilt", tmp_path)
    assert load_model(folder / "model.keras").input_shape == (None, 4)
    (leaf,) = tf.saved_model.load(str(folder / "saved_model")).serve.input_signature
    assert leaf.shape.as_list() == [None, 4]


@SLOW
@parametrize("flags", [(), ("--save_optimizer",)])
def test_a_process_without_the_users_code_loads_a_compiled_model(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    folder, model = exported("of_keras", tmp_path / "model", *flags)
    ended = python("-I", "-c", COMPILED, str(folder), "quiet" if flags else "told")
    kernel, bias = model.get_weights()
    error = abs(kernel.sum() + bias[0] - 1)
    *shown, updates = ended.stdout.split()
    assert [float(value) for value in shown] == pytest.approx([error**2, error], rel=1e-5)
    assert int(updates) == (3 if flags else 0)


def test_a_model_that_needs_the_users_code_to_be_compiled_is_not_and_a_line_says_why(
    tmp_path: Path, caplog: Log
) -> None:
    folder, _ = exported("of_user", tmp_path / "model")
    assert not load_model(folder / "model.keras").compiled
    assert "model.keras is not compiled, as its __lambda__ is code of yours" in caplog.text
