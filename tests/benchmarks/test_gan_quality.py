"""Tests that the comparison of GANs names settings that the trainer takes."""

from pathlib import Path
from typing import Any

from benchmarks.gan_quality import CASES, PARSER, done, flags_of, result_file
from trainer.base.run_files.job_files import write_json
from trainer.base.settings.request import resolve

SHORT = [
    "--minutes=0.01",
    "--points=2",
    "--samples=64",
    "--fashion=data/clothes",
    "--photos=data/photos",
]


def test_every_case_has_settings_that_the_trainer_takes() -> None:
    options = PARSER.parse_args([*SHORT, "--out=out"])
    configs: list[Any] = [resolve(flags_of(case, 3, options)).config for case in CASES]
    assert {config.seed for config in configs} == {3}
    assert len({(config.model, config.data, config.diff_augment) for config in configs}) == len(
        CASES
    )


def test_a_run_of_other_settings_is_none_of_these(tmp_path: Path) -> None:
    case = CASES[0]
    options = PARSER.parse_args([*SHORT, f"--out={tmp_path}"])
    for settings, known in ((flags_of(case, 3, options), True), (["--seed=3"], False)):
        write_json(result_file(case, 3, options), {"settings": settings})
        assert bool(done(case, 3, options)) is known
