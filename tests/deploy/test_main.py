"""The verbs: listed, helped, light."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.__main__ import VERBS, main

ROOT = Path(__file__).parents[2]
LIGHT = """
import sys
from deploy.__main__ import main
code = main(sys.argv[1:])
heavy = {"tensorflow", "keras", "numpy", "google.api_core", "google.auth", "requests"} & set(sys.modules)
sys.exit(code or (f"imported: {heavy}" if heavy else 0))
"""

WHERE = ["--project=p", "--region=us-central1", "--bucket=gs://my-bucket"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["machines"],
        ["render", "l4x4", "--recipe=wgan_gp_digits", *WHERE],
        ["submit", "l4x4", "--recipe=wgan_gp_digits", *WHERE, "--dry_run"],
    ],
    ids=lambda value: value[0],
)
def test_a_verb_that_needs_no_network_imports_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert f"usage: python -m deploy {verb}" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert verb in capsys.readouterr().out


def test_a_misspelt_verb_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submitt"]) == 2
    assert "submitt: no such verb; did you mean 'submit'?" in capsys.readouterr().err
