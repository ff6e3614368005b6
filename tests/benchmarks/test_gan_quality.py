"""Tests that the comparison of GANs measures a run, repeats none that is done, and prints medians with their spread."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import keras
import pytest

from benchmarks.gan_quality import CASES, PARSER, done, flags_of, measure, result_file
from trainer.base.settings.resolution import resolve

SHORT = ["--minutes=0.01", "--points=2", "--samples=64", "--fashion=data/clothes", "--photos=data/photos"]


@pytest.mark.slow
def test_a_run_is_measured_and_known_again(tmp_path: Path) -> None:
    options = PARSER.parse_args([*SHORT, f"--out={tmp_path}"])
    features = tmp_path / "features" / "digits" / "model" / "model.keras"
    features.parent.mkdir(parents=True)
    layers = [keras.Input((16, 16, 1)), keras.layers.Flatten(), keras.layers.Dense(4), keras.layers.Dense(10)]
    keras.Sequential(layers).save(features)
    case = "digits/r3gan"
    assert done(case, 1, options) == {}
    measure(case, 1, options)
    curve = done(case, 1, options)["curve"]
    measures = {"fid", "kid", "precision", "recall", "density", "coverage"}
    assert [set(point) for point in curve] == [{"seconds", "steps", *measures}] * 2
    assert 0.3 <= curve[0]["seconds"] < curve[1]["seconds"]
    assert curve[0]["steps"] < curve[1]["steps"]
    assert result_file(case, 1, options).with_suffix(".png").stat().st_size > 1000
    assert done(case, 2, options) == {}
    assert done(case, 1, Namespace(**{**vars(options), "minutes": 1.0})) == {}


def test_every_case_has_settings_that_the_trainer_takes() -> None:
    options = PARSER.parse_args([*SHORT, "--out=out"])
    configs: list[Any] = [resolve(flags_of(case, 3, options)).config for case in CASES]
    assert {config.seed for config in configs} == {3}
    assert len({(config.model, config.data, config.diff_augment) for config in configs}) == len(CASES)
