"""Tests that nothing is sent that could be known to fail: each wrong input is one line and exit code 2."""

from pathlib import Path

import pytest

from deploy.__main__ import main
from tests.deploy.cli.wrong_inputs import COMMANDS, rows, spec
from tests.deploy.conftest import WHERE, Capture, Command
from tests.deploy.emulator import Emulator

ROWS = rows()


@pytest.mark.parametrize(
    ("wrong", "tier", "flags", "files", "line"), ROWS, ids=[row[0] or " ".join(row[2]) or row[4] for row in ROWS]
)
def test_a_wrong_input_sends_nothing(
    wrong: str, tier: str, flags: list[str], files: dict[str, str], line: str, cloud: Emulator, capsys: Capture
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


@pytest.mark.parametrize(("words", "line"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
def test_a_wrong_command_is_one_line_and_writes_nothing(words: list[str], line: str, refused: Command) -> None:
    assert line in refused(*words)
    assert not Path("runs").exists()
