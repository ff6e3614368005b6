"""Tests GANs that are given the class of each image: replicas, refusals, and a whole run with what
it writes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures import Capture, Folders, parametrize
from tests.support import read_lines, refused, resolved, run_job, run_steps, small
from tests.trainer.measures.test_quality import saved_classifier
from trainer import generate
from trainer.base.run_files.job_files import read_result
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset, NestedArrays
from trainer.data.sample_grids import noise
from trainer.run import served_model

CLASSES = 10
SMALL = ("--model=dcgan", "--image_size=16", "--width=2", "--latent_dim=8", "--global_batch_size=8")


LABELLED = f"--data={__name__}:labelled"


@parametrize(
    "flags, line",
    [
        (
            ("--model=cnn", "--image_size=24"),
            "conditional is a setting of dcgan, wgan_gp, r3gan, not of model=cnn",
        ),
        (
            (LABELLED, "--labels=none"),
            "has no labels: a conditional GAN needs them, e.g. class folders",
        ),
        (
            (LABELLED, "--labels=in_sequence"),
            "has labels but no class_names: set them in its Dataset",
        ),
        ((LABELLED, "--labels=one_hot"), "one integer label is needed"),
        (
            (LABELLED, "--labels=too_large"),
            "has 2 classes: labels from 0 to 2: must be from 0 to 1",
        ),
    ],
)
def test_what_has_no_classes_is_refused(flags: tuple[str, ...], line: str) -> None:
    with refused(line):
        run_steps(small("--conditional", *flags), 0)


IMAGES = np.zeros((16, 16, 16, 1), np.uint8)


def labelled(config: TrainConfig, *, labels: str = "none") -> Any:
    """Returns images whose labels are no classes, or whose largest label is not known before they
    are read."""
    return {
        "none": IMAGES,
        "one_hot": Dataset(
            "one", NestedArrays(IMAGES, np.eye(16, dtype=np.float32)), class_names=("a",) * 16
        ),
        "too_large": Dataset(
            "large", NestedArrays(IMAGES, np.arange(16) % 3), class_names=("a", "b")
        ),
        "in_sequence": (
            tf.data.Dataset.from_tensor_slices((IMAGES, np.arange(16) % CLASSES)).batch(8)
        ),
    }[labels]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Folders) -> Path:
    """Runs a conditional GAN that measures FID."""
    folder = tmp_path_factory.mktemp("trained")
    quality = [
        "--fid_every_steps=2",
        "--fid_samples=40",
        f"--fid_features={saved_classifier(folder)}",
    ]
    flags = [
        "--conditional",
        "--steps=4",
        "--steps_per_loop=1",
        "--checkpoint_every_steps=2",
        *quality,
    ]
    return run_job(resolved(*SMALL, *flags, f"--job_dir={folder / 'job'}"))


def test_a_run_draws_a_class_a_row_and_measures_them(trained: Path) -> None:
    *_, newest = sorted((trained / "samples").iterdir())
    assert tf.io.decode_png(newest.read_bytes()).shape == (10 * 66 + 2, 10 * 66 + 2, 1)
    quality = read_result(trained)[0]["final"]["quality"]
    assert quality["samples"] == 40
    lines = read_lines(trained / "stats.jsonl")
    assert [line["quality"] for line in lines if line["kind"] == "quality"][1:] == [quality]


@parametrize(
    "flags, rows, columns",
    [
        (("--label=7", "--count=6"), 2, 3),
        (("--label=7,0", "--count=3"), 2, 3),
        (("--label=all", "--count=2"), 10, 2),
        ((), 10, 10),
    ],
)
def test_generate_draws_the_classes_asked_for(
    trained: Path, tmp_path: Path, flags: tuple[str, ...], rows: int, columns: int
) -> None:
    assert generate.main([str(trained), f"--out={tmp_path}/grid.png", *flags]) == 0
    picture = tf.io.decode_png((tmp_path / "grid.png").read_bytes()).numpy().astype(int)
    assert picture.shape == (rows * 66 + 2, columns * 66 + 2, 1)
    if flags[0:1] == ("--label=7,0",):
        generator = served_model.ServedModel(trained / "model", "run")
        # of the second row and column
        image = generator.images(noise(1, 3, 8)[1:2], tf.constant([0]))
        assert np.abs(picture[68:132:4, 68:132:4] - image[0].astype(int)).max() <= 1


@parametrize("label", ["10", "-1", "cat", "1,,2"])
def test_generate_refuses_classes_that_the_model_has_not(
    trained: Path, label: str, capsys: Capture
) -> None:
    assert generate.main([str(trained), f"--label={label}"]) == 2
    expected = (
        f"label={label}: this generator has 10 classes: use a number from 0 to 9, several with"
        " commas, or all"
    )
    assert expected in capsys.readouterr().err
    with refused(
        "label=7: this generator takes no labels: drop --label, or train with --conditional"
    ):
        generate.labels_of("7", 0)
