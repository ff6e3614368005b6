"""Tests every model on 1, 2 and 4 replicas, the parts of classifiers, and the rules for a user's
own model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, applications, layers
from keras.src.applications import efficientnet as efficientnet_of_keras
from keras.utils import set_random_seed
from numpy.random import default_rng
from numpy.testing import assert_allclose

from tests.fixtures import SLOW, Folders, parametrize
from tests.support import largest_difference, refused, resolved, run_steps, slow, small, weights
from trainer.base.settings.model_settings import MODELS, MLPConfig
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.data.dataset import Arrays, Dataset
from trainer.invariance.layers import depends_on_replicas, make_independent, refresh_normalization
from trainer.invariance.step import StepContext, in_step
from trainer.models.construction import build_model
from trainer.models.efficientnet import _freeze_below
from trainer.models.learning_rates import StepSchedule
from trainer.run import replica_check
from trainer.run.export import plain_copy

RANDOM = default_rng(0)
FAMILIES = {
    "mlp": ("--model=mlp", "--dropout=0.3", "--width=16", "--augment=flip,crop"),
    "cnn": ("--model=cnn", "--dropout=0.3", "--width=4", "--image_size=24", "--augment=flip"),
    "dcgan": ("--model=dcgan",),
    # ten times the default: fifty steps then move it well
    "wgan_gp": ("--model=wgan_gp", "--learning_rate=1e-3"),
    "conditional": ("--model=wgan_gp", "--conditional", "--learning_rate=1e-3"),
    "conditional dcgan": ("--model=dcgan", "--conditional", "--learning_rate=1e-3"),
    "r3gan": ("--model=r3gan", "--diff_augment=color,translation,cutout"),
}


@parametrize(
    "name, replicas",
    [
        ("wgan_gp", 2),
        *(
            slow(name, replicas)
            for name, replicas in [("mlp", 4), ("cnn", 4), ("wgan_gp", 4), ("conditional dcgan", 2)]
        ),
    ],
)
def test_in_float64_replicas_agree_to_1e_10(name: str, replicas: int) -> None:
    """tests/trainer/run/test_job.py has r3gan on 2."""
    flags = (*FAMILIES.get(name, (f"--model={name}",)), "--precision=float64")
    (alone, logs), (together, others) = (
        run_steps(small(*flags, f"--replicas={n}"), 50) for n in (1, replicas)
    )
    assert largest_difference(alone, together) < 1e-10
    assert others.means() == pytest.approx(logs.means(), rel=1e-6, abs=1e-10)
    assert logs.means().keys() == set(MODELS.get(small(*flags).model, MODELS["mlp"]).metrics)


@SLOW
@parametrize("name", ["tests.models:own_batch_norm", "cnn", "dcgan", "wgan_gp"])
def test_in_float32_replicas_differ_by_rounding_alone(name: str) -> None:
    flags = [
        flag
        for flag in FAMILIES.get(name, (f"--model={name}",))
        if not flag.startswith("--augment")
    ]
    flags += [f"--data={__name__}:adverse", "--channels=3"] + ["--critic_steps=2"] * (
        name == "wgan_gp"
    )
    alone, together = (weights(run_steps(small(*flags, f"--replicas={n}"), 20)[0]) for n in (1, 2))
    controls = [
        largest_difference(alone, weights(run_steps(small(*flags), 20, seed)[0]))
        for seed in (7, 8, 9)
    ]
    assert largest_difference(alone, together) <= 3 * max(controls)


def test_learning_rates_over_a_run() -> None:
    rates = [float(StepSchedule(1.0, "cosine", 10, 110)(update)) for update in range(120)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.5)
    assert rates[110] == rates[119] == pytest.approx(0.0, abs=1e-7)
    flat = StepSchedule(2.0, "constant", 0, 100, updates_per_step=5, later=(10, 0.5))
    assert [float(flat(update)) for update in (0, 49, 50, 499)] == [2.0, 2.0, 0.5, 0.5]


def labelled(classes: int, count: int = 64, size: int = 32) -> Dataset:
    draw = default_rng(0)
    labels = (np.arange(count) % classes).astype(np.int32)
    images = (
        draw.integers(0, 60, (count, size, size, 3))
        + (180 * labels / max(classes - 1, 1))[:, None, None, None]
    )
    return Dataset(
        "made", Arrays(images.astype(np.uint8), labels), class_names=tuple(map(str, range(classes)))
    )


def adverse(config: TrainConfig) -> Dataset:
    """Returns images with a channel far from 0, a channel of large values, and a constant one."""
    size = config.image_size
    draw = default_rng(0)
    far = draw.normal(1000.0, 1.0, (64, size, size))
    large = draw.normal(0.0, 1000.0, (64, size, size))
    images = np.stack([far, large, np.full(far.shape, 100.0)], axis=-1).astype(np.float32)
    return Dataset(
        "adverse",
        Arrays(images, (np.arange(64) % 2).astype(np.int32)),
        class_names=("one", "other"),
    )


def two_classes(config: TrainConfig) -> Dataset:
    return labelled(2)


def test_a_classifier_needs_labels_of_two_classes() -> None:
    """What has no labels: test_conditional.py."""
    with refused("has only one class"):
        build_model(MLPConfig(model="mlp", channels=3), labelled(1))


def test_images_to_evaluate_a_classifier_with_need_labels() -> None:
    parts = labelled(2).train, Arrays(np.zeros((4, 32, 32, 3), np.uint8))
    dataset = Dataset("made", *parts, class_names=("one", "other"))
    with refused(
        "data=made: the images for training have labels, but those for evaluation have none"
    ):
        build_model(MLPConfig(model="mlp", channels=3), dataset)
    gan = ["--model=dcgan", "--image_size=32", "--channels=3", "--width=4"]
    assert build_model(resolved(*gan), dataset).generator.built


EFFICIENT = [
    "--model=efficientnet",
    "--variant=B0",
    "--image_size=32",
    "--channels=3",
    "--global_batch_size=16",
]
EFFICIENT += [f"--data={__name__}:two_classes", "--steps=3", "--learning_rate=1e-3"]


@pytest.fixture(scope="module")
def _two_blocks() -> Iterator[None]:
    """Leaves two of the seven kinds of blocks: every layer is there, and a trace takes a tenth of
    the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            efficientnet_of_keras,
            "DEFAULT_BLOCKS_ARGS",
            efficientnet_of_keras.DEFAULT_BLOCKS_ARGS[:2],
        )
        yield


@pytest.fixture(scope="module")
def efficientnet_weights(_two_blocks: None, tmp_path_factory: Folders) -> Path:
    """Writes a weights file like a downloaded one, with random weights."""
    path = tmp_path_factory.mktemp("weights") / "b0.weights.h5"
    set_random_seed(0)
    applications.EfficientNetB0(
        include_top=False, weights=None, input_shape=(32, 32, 3)
    ).save_weights(path)
    return path


def changed(before: Model, after: Model) -> set[str]:
    """Returns the names of the layers whose weights differ."""
    pairs = zip(before.weights, after.weights, strict=True)
    return {
        old.path.split("/")[-2]
        for old, new in pairs
        if not np.array_equal(old.numpy(), new.numpy())
    }


@SLOW
def test_efficientnets_head_learns_first_and_the_upper_blocks_later(
    efficientnet_weights: Path,
) -> None:
    flags = [*EFFICIENT, f"--weights={efficientnet_weights}"]
    tuned = resolved(*flags, "--fine_tune_from=block2b", "--fine_tune_after_steps=2")
    start = run_steps(tuned, 0)[0]
    assert depends_on_replicas(start, replicas=2) == []
    assert changed(start, run_steps(tuned, 2)[0]) == {"logits"}
    moved = changed(start, run_steps(tuned, 3)[0])
    assert "block2b_project_conv" in moved
    assert "top_conv" in moved
    assert not any(name.startswith(("block1", "block2a")) or name.endswith("_bn") for name in moved)


def test_a_network_of_keras_keeps_its_layers_and_a_pretrained_one_stays_still() -> None:
    images = Input((8, 8, 3))
    x = layers.BatchNormalization(momentum=0.8, name="norm")(images)
    x = layers.Normalization()(x)
    stock = Model(images, layers.Dropout(0.2, noise_shape=(None, 1, 1, 1), name="drop")(x))
    stock.set_weights(
        [RANDOM.uniform(0.5, 2.0, weight.shape).astype(weight.dtype) for weight in stock.weights]
    )
    refresh_normalization(stock)
    pixels = RANDOM.uniform(0, 255, (2, 8, 8, 3)).astype(np.float32)
    inferred = stock(pixels)
    kinds = [type(layer) for layer in stock.layers]
    with make_replicas(TrainConfig(replicas=2)).strategy.scope():
        assert [line.split()[0] for line in depends_on_replicas(stock, replicas=2)] == [
            f"{stock.name}/norm"
        ]
        make_independent(stock, TrainConfig(replicas=2))
        assert depends_on_replicas(stock, replicas=2) == []
    context = StepContext(0, tf.constant(0, tf.int64), 0, 2, 2)
    with in_step(context):
        assert not np.allclose(stock(pixels, training=True), inferred, rtol=1e-5)
    inferred = stock(pixels)  # training moved the averages
    _freeze_below(stock, "")
    with in_step(context):
        assert_allclose(stock(pixels, training=True), inferred, rtol=1e-5)
    template = plain_copy(stock)
    assert (
        [type(layer) for layer in stock.layers]
        == [type(layer) for layer in template.layers]
        == kinds
    )
    assert_allclose(template(pixels), stock(pixels), rtol=1e-5)
    saved = template.get_layer("norm")
    assert (saved.momentum, saved.synchronized) == (0.8, False)


@SLOW
@pytest.mark.usefixtures("_two_blocks")
def test_efficientnet_from_scratch_does_not_depend_on_replicas() -> None:
    flags = [*EFFICIENT, "--weights=none", "--precision=float64", "--dropout=0.5"]
    runs = [run_steps(resolved(*flags, f"--replicas={n}"), 3) for n in (1, 2)]
    # Some tensors are 0 up to rounding, as batch norm cancels them: those are compared with the
    # size of an update.
    assert largest_difference(runs[0][0], runs[1][0], smallest_norm=1e-3) < 1e-8
    assert runs[0][1].means() == pytest.approx(runs[1][1].means(), rel=1e-8)


@pytest.mark.usefixtures("_two_blocks")
def test_efficientnets_weights_that_cannot_be_loaded() -> None:
    with refused("cannot be loaded for EfficientNetB0"):
        build_model(resolved(*EFFICIENT, f"--weights={__file__}"), labelled(2))


def test_an_unknown_block_is_named(efficientnet_weights: Path) -> None:
    flags = [*EFFICIENT, f"--weights={efficientnet_weights}", "--fine_tune_from=block9z"]
    with refused("unknown block: use one of block1a, block2a"):
        build_model(resolved(*flags), labelled(2))


def test_a_metric_that_float64_lacks_is_left_out_of_a_comparison_and_named() -> None:
    flags = [
        "--data=digits",
        "--model=tests.mistakes:measures_top_5",
        "--image_size=16",
        "--global_batch_size=8",
    ]
    config = resolved(*flags, "--expect_devices=1")  # it uses only the CPU
    name = "sparse_top_k_categorical_accuracy"
    assert replica_check.compare_replicas(config) == (
        [],
        [],
        f"in float64 (without {name}, which does not run in it)",
    )
