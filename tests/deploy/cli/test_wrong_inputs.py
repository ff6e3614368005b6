"""Tests that nothing is sent that could be known to fail: each wrong input is one line and exit
code 2."""

import re
from pathlib import Path

import pytest

from deploy.__main__ import main
from tests.deploy.cli.wrong_inputs import COMMANDS, FLAGS, rows, spec
from tests.deploy.conftest import WHERE, Capture, Command
from tests.deploy.emulator import Emulator

ROWS = rows()


@pytest.mark.parametrize(
    ("wrong", "tier", "flags", "files", "line"),
    ROWS,
    ids=[row[0] or " ".join(row[2]) or row[4] for row in ROWS],
)
def test_a_wrong_input_sends_nothing(
    wrong: str,
    tier: str,
    flags: list[str],
    files: dict[str, str],
    line: str,
    cloud: Emulator,
    capsys: Capture,
) -> None:
    if wrong:
        Path("wrong.yaml").write_text(spec(wrong))
    for name, content in {"__init__.py": "", **files}.items():
        Path("my_models", name).parent.mkdir(parents=True, exist_ok=True)
        Path("my_models", name).write_text(content)
    assert main(["submit", tier, *flags, *WHERE, "--project=my-proj"]) == 2
    shown = capsys.readouterr()
    assert line in shown.err
    assert shown.err.startswith("error: wrong" if wrong else "error: ")
    assert (shown.err.count("\n"), shown.out, cloud.requests) == (1, "", [])
    assert not Path("runs").exists()


# Flags that `compare` has not, or that mean something else there.
NOT_OF_COMPARE = re.compile(
    "--(replicas|job_dir|name|detach|machine_type|tensorboard_instance|spec|out|track)"
)
COMPARED = [row for row in FLAGS if not NOT_OF_COMPARE.search(" ".join([row[0], *row[1]]))]


@pytest.mark.parametrize(
    ("tier", "flags", "line"), COMPARED, ids=[" ".join(row[1]) for row in COMPARED]
)
def test_what_submit_refuses_a_comparison_refuses_before_it_pays(
    tier: str, flags: list[str], line: str, cloud: Emulator, refused: Command
) -> None:
    package = Path("my_models")
    package.mkdir()
    for name in ("__init__.py", "gan.py"):
        (package / name).write_text("def build():\n    pass\n")
    place = ["--on=vertex", *WHERE, "--project=my-proj", "--out=compared"]
    assert line in refused("compare", tier, *flags, *place)
    assert (cloud.requests, Path("compared").exists()) == ([], False)


@pytest.mark.parametrize(
    ("words", "line"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS]
)
def test_a_wrong_command_is_one_line_and_writes_nothing(
    words: list[str], line: str, refused: Command
) -> None:
    assert line in refused(*words)
    assert not Path("runs").exists()
