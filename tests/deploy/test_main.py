"""Tests that every verb is listed, has help and imports little."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.__main__ import VERBS, main
from trainer.errors import PlatformFault

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
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert f"usage: python -m deploy {verb}" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert verb in capsys.readouterr().out


def test_no_verb_is_imported_by_another_module() -> None:
    """deploy/__main__.py imports verbs by name; what two verbs share is in other modules."""
    assert {path.stem for path in (ROOT / "deploy/cli").glob("*.py")} >= VERBS.keys()
    found = re.compile(rf"^\s*(?:from|import) deploy\.cli(?:\.| import .*\b)(?:{'|'.join(VERBS)})\b", re.M)
    assert found.search("import sys\n    from deploy.cli import target, submit")
    paths = [path for path in (ROOT / "deploy").rglob("*.py") if found.search(path.read_text(encoding="utf-8"))]
    assert paths == []


def test_a_misspelt_verb_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submitt"]) == 2
    assert "submitt: unknown verb; did you mean 'submit'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["local", "cpu", "--recipe=wgan_gp_digits", "--job_dir="],
        ["local", "cpu", "--recipe="],
        ["local", ""],
        ["render", "cpu", "--recipe=wgan_gp_digits", *WHERE, "--package", " "],
        ["submit", "cpu", "--recipe=wgan_gp_digits", *WHERE, "--regions=", "--dry_run"],
        ["compare", "cpu", "--recipe=wgan_gp_digits", "--out="],
        ["jobs", "--project=", "--region=us-central1"],
        ["machines", "--accelerator="],
    ],
    ids=" ".join,
)
def test_what_is_empty_is_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    (empty,) = (one for one in arguments if one.endswith("=") or not one.strip())
    assert shown.err == (
        f"error: empty argument {empty!r}: give a value, or leave it out (is a variable of the shell not set?)\n"
    )
    assert (shown.out, list(tmp_path.iterdir())) == ("", [tmp_path / "work"])


def test_a_setting_may_be_emptied(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty value overrides the recipe, which has flip here."""
    assert main(["render", "cpu", "--recipe=wgan_gp_photos", "--data=digits", "--augment=", *WHERE]) == 0
    assert "- --augment=\n" in capsys.readouterr().out


def test_a_fault_of_the_platform_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(arguments: object) -> int:
        raise PlatformFault("gs://bucket/runs: Cloud Storage does not answer as it should")

    monkeypatch.setattr("deploy.cli.report.main", away)
    assert main(["report", "gs://bucket/runs"]) == 1
    line = "error: gs://bucket/runs: Cloud Storage does not answer as it should: run the same command again later\n"
    assert capsys.readouterr().err == line
