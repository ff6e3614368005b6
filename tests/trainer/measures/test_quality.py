"""Tests that evaluation counts each example once, and that FID, KID and nearest neighbours follow
formulas."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, Sequential, applications, layers
from keras.utils import set_random_seed
from numpy.testing import assert_allclose

from tests.drill import losses, numbers, read
from tests.fixtures import SLOW, Folders, Log, Make, Patch, parametrize
from tests.support import Signals, refused, run_job, small, tiny
from trainer.base.errors import DONE, INTERRUPTED, UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.data.sources import load_dataset
from trainer.measures.evaluation import evaluation
from trainer.measures.fid import Extractor, Fid
from trainer.models.construction import build_model
from trainer.run import job
from trainer.run.training_setup import build_setup, set_precision_and_seed


def test_only_models_with_a_loss_are_evaluated(caplog: Log) -> None:
    config = small("--model=mlp", "--evaluation_fraction=0.1")
    digits = load_dataset(config)
    model = build_model(config, digits)
    one = make_replicas(config)
    assert evaluation(model, one, digits, 16) is not None
    assert evaluation(model, one, replace(digits, evaluation=None), 16) is None
    assert evaluation(build_model(small(), digits), one, digits, 16) is None
    without_loss = Sequential([Input((16, 16, 1)), layers.Flatten(), layers.Dense(10)])
    without_loss.compile()
    assert evaluation(without_loss, one, digits, 16) is None
    assert "Sequential is not compiled with a loss, and has no test_step of its own" in caplog.text


@pytest.fixture(scope="module")
def features(tmp_path_factory: Folders) -> Path:
    return saved_classifier(tmp_path_factory.mktemp("classifier"))


def saved_classifier(folder: Path) -> Path:
    """Saves a classifier of 16-pixel digits."""
    set_random_seed(1)
    hidden = [
        layers.Rescaling(1 / 255),
        layers.Flatten(),
        layers.Dense(8, activation="relu"),
    ]
    Sequential([Input((16, 16, 1)), *hidden, layers.Dense(10)]).save(folder / "model.keras")
    return folder / "model.keras"


def test_fid_does_not_depend_on_replicas_and_keeps_real_features(
    features: Path, monkeypatch: Patch
) -> None:
    found = []
    for replicas in (1, 2):
        own = [f"--replicas={replicas}", "--fid_samples=50", f"--fid_features={features}"]
        config = small("--fid_every_steps=9", *own)
        where = make_replicas(config)
        setup = build_setup(config, where)
        gan = setup.model
        reals: Any = setup.dataset.train
        # the contract
        model = SimpleNamespace(
            averaged_generator=gan.averaged_generator, latent_dim=gan.latent_dim
        )
        fid = Fid(config, model, reals, where)
        found.append(fid())
        monkeypatch.setattr(fid, "_of_reals", None)  # they are read once
        assert fid() == found[-1]
        assert fid().keys() == {*fid.names}
    assert found[1]["fid"] == pytest.approx(found[0]["fid"], rel=1e-3)
    assert found[1]["kid"] == pytest.approx(found[0]["kid"], rel=1e-2)


@parametrize("tf32", [True, False])
def test_features_are_never_computed_in_tf32(features: Path, tf32: bool) -> None:
    enabled = tf.config.experimental.tensor_float_32_execution_enabled
    set_precision_and_seed(
        config := small(
            f"--tf32={tf32}",
            "--fid_every_steps=9",
            "--fid_samples=20",
            f"--fid_features={features}",
        )
    )
    assert enabled() is tf32
    model = SimpleNamespace(latent_dim=16, averaged_generator=None)
    reals: Any = load_dataset(config).train
    fid = Fid(config, model, reals, make_replicas(config))
    seen = []
    fid._collect(lambda start: seen.append(enabled()) or tf.zeros((16, 8)))
    assert (seen, enabled()) == ([False, False], tf32)


def features_in(precision: str, name: str) -> tuple[str, np.ndarray]:
    """Returns the network's identity and the features of an image, in a run of that precision."""
    set_precision_and_seed(TrainConfig(precision=precision))
    images = tf.random.stateless_uniform((1, 32, 32, 1), (1, 2), maxval=256, dtype=tf.int32)
    extract = Extractor(name)
    found = extract(images)
    assert (found.dtype, keras.config.dtype_policy().name) == (tf.float32, precision)
    return extract.identity, found.numpy()


@parametrize("precision", ["mixed_bfloat16", "mixed_float16", "float64"])
def test_features_do_not_depend_on_precision(
    precision: str, features: Path, monkeypatch: Patch
) -> None:
    def small_network(input_shape: tuple[int, int, int], **given: object) -> Model:
        """Replaces InceptionV3, which is slow to build."""
        parts = [layers.Conv2D(8, 9, strides=9), layers.GlobalAveragePooling2D()]
        return Sequential([Input(input_shape), *parts])

    monkeypatch.setattr(applications, "InceptionV3", small_network)
    for name in ("inception", str(features)):
        one, other = (features_in(each, name) for each in ("float32", precision))
        assert one[0] == other[0]
        assert_allclose(one[1], other[1], rtol=1e-6)


@parametrize(
    "name, line",
    [
        ("text.keras", "use a classifier of yours"),
        ("inception", "use its weights of ImageNet, without the top, with --fid_features=PATH.h5"),
    ],
)
def test_a_network_that_cannot_be_loaded_says_what_to_do(
    tmp_path: Path, name: str, line: str, monkeypatch: Patch
) -> None:
    def offline(**given: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(applications, "InceptionV3", offline)
    (tmp_path / "text.keras").write_text("no model")
    with pytest.raises(UserError, match=rf"cannot be loaded \(.*: {line}"):
        Extractor(name if name == "inception" else str(tmp_path / name))


@SLOW  # it builds InceptionV3
def test_inception_gives_its_pooled_features(tmp_path: Path) -> None:
    shape = (299, 299, 3)
    network = applications.InceptionV3(
        include_top=False, weights=None, pooling="avg", input_shape=shape
    )
    network.save_weights(tmp_path / "i.weights.h5")
    images = tf.random.stateless_uniform((1, 32, 32, 1), (1, 2), maxval=256, dtype=tf.int32)
    # it is the run's, not that of the features
    set_precision_and_seed(TrainConfig(precision="mixed_bfloat16"))
    found = Extractor(str(tmp_path / "i.weights.h5"))(images)
    resized = tf.image.resize(
        tf.repeat(tf.cast(images, tf.float32), 3, axis=-1), shape[:2], antialias=True
    )
    assert_allclose(found, network(resized / 127.5 - 1), rtol=1e-4, atol=1e-5)


@parametrize("shape", [(8, 16, 1), (64,), (None, None, 1)])
def test_features_come_from_a_classifier_of_square_images(
    shape: tuple[int | None, ...], tmp_path: Path
) -> None:
    parts = [
        Input(shape),
        layers.GlobalMaxPooling2D() if None in shape else layers.Flatten(),
        layers.Dense(4),
        layers.Dense(10),
    ]
    Sequential(parts).save(file := tmp_path / "model.keras")
    line = f"its input is {(None, *shape)}: a classifier of square images of one size is required"
    with refused(f"fid_features={file}: {line}"):
        Extractor(str(file))


def fid_config(features: Path, folder: Path) -> TrainConfig:
    flags = ["--model=dcgan", "--fid_every_steps=2", "--fid_samples=20", "--report_every_steps=2"]
    return tiny(*flags, f"--fid_features={features}", f"--job_dir={folder}")


@pytest.fixture(scope="module")
def measured(features: Path, tmp_path_factory: Folders) -> Path:
    """Runs a GAN that measures FID."""
    return run_job(fid_config(features, tmp_path_factory.mktemp("measured") / "job"))


def test_a_gan_run_reports_fid(small_config: Make, features: Path, measured: Path) -> None:
    result = read(measured / "result.json")
    assert result["final"]["quality"]["features"] == str(features)
    assert result["final"]["metrics"]["fid"] > 0
    assert [step for kind, step, _ in numbers(measured) if kind == "quality"] == [2, 4]
    with refused("has no averaged_generator and no latent_dim: FID needs a generator"):
        job.run(small_config("--model=tests.models:classifier", "--fid_every_steps=2"), [], 0.0)


def test_a_signal_in_the_midst_of_fid_leaves_it_to_the_same_command(
    features: Path, measured: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Checks that hooks before it at this step, such as the report, run again and leave one
    line."""
    signals = Signals(monkeypatch)
    collect = Fid._collect
    left = []

    def interrupted(self: Fid, features_of: Any) -> Any:
        features = collect(self, features_of)
        if not left:
            left.append(True)
            signals.come()
        return features

    monkeypatch.setattr(Fid, "_collect", interrupted)
    config = fid_config(features, tmp_path / "job")
    folder = Path(config.job_dir)
    assert job.run(config, [], 0.0) == INTERRUPTED
    assert [line[:2] for line in numbers(folder)] == [("report", 2)]
    assert job.run(config, [], 0.0) == DONE
    assert numbers(folder) == numbers(measured)
    assert losses(folder) == pytest.approx(losses(measured), rel=1e-4)
