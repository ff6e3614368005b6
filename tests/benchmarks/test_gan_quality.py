"""Tests that the comparison of GANs names settings that the trainer takes."""

from typing import Any

from benchmarks.gan_quality import CASES, PARSER, flags_of
from trainer.base.settings.resolution import resolve

SHORT = ["--minutes=0.01", "--points=2", "--samples=64", "--fashion=data/clothes", "--photos=data/photos"]


def test_every_case_has_settings_that_the_trainer_takes() -> None:
    options = PARSER.parse_args([*SHORT, "--out=out"])
    configs: list[Any] = [resolve(flags_of(case, 3, options)).config for case in CASES]
    assert {config.seed for config in configs} == {3}
    assert len({(config.model, config.data, config.diff_augment) for config in configs}) == len(CASES)
