"""Tests that nothing is sent that could be known to fail: each wrong input is one line and exit
code 2."""

import re
from pathlib import Path

import pytest

from tests.deploy.cli.wrong_inputs import COMMANDS, FLAGS, GAN, rows, words_of
from tests.deploy.conftest import WHERE, Command
from tests.deploy.emulator import Emulator
from tests.deploy.planted import write_files

PLACE = [*WHERE, "--project=my-proj"]


@pytest.mark.parametrize(("spec", "words", "files", "line"), rows())
def test_a_wrong_input_sends_nothing(
    spec: str, words: list[str], files: dict[str, str], line: str, cloud: Emulator, refused: Command
) -> None:
    Path("wrong.yaml").write_text(spec)
    write_files({"__init__.py": "", **files}, "my_models")
    error = refused("submit", *words, *PLACE)
    assert line in error
    assert error.startswith("error: wrong" if spec else "error: ")
    assert cloud.requests == []
    assert not Path("runs").exists()


# Flags that `compare` has not, or that mean something else there.
NOT_OF_COMPARE = re.compile(
    "--(replicas|job_dir|name|detach|machine_type|tensorboard_instance|spec|out|track)"
)


@pytest.mark.parametrize(
    "row", [row for row in FLAGS if not NOT_OF_COMPARE.search(" ".join(row[:-1]))]
)
def test_what_submit_refuses_a_comparison_refuses_before_it_pays(
    row: tuple[str, ...], cloud: Emulator, refused: Command
) -> None:
    write_files({"__init__.py": "", **GAN}, "my_models")
    assert row[-1] in refused("compare", *words_of(row), "--on=vertex", *PLACE, "--out=compared")
    assert cloud.requests == []
    assert not Path("compared").exists()


@pytest.mark.parametrize(("words", "line"), COMMANDS)
def test_a_wrong_command_is_one_line_and_writes_nothing(
    words: list[str], line: str, refused: Command
) -> None:
    assert line in refused(*words)
    assert not Path("runs").exists()
