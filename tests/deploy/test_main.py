"""Tests that every verb is listed, has help and imports little."""

import io
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from deploy.__main__ import VERBS, main
from deploy.base.console import printed_on, say
from tests.deploy.conftest import ROOT, WHERE, Capture, Command, run
from tests.deploy.planted import plant
from tests.fixtures import Patch
from trainer.base.errors import PlatformFault

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
LIGHT = """
import sys
from deploy.__main__ import main
code = main(sys.argv[1:])
heavy = {"tensorflow", "keras", "numpy", "google.api_core", "google.auth", "requests"}
heavy &= set(sys.modules)
sys.exit(code or (f"imported: {heavy}" if heavy else 0))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["machines"],
        [
            "submit",
            "l4x4",
            "--recipe=wgan_gp_digits",
            "--project=p",
            "--image=eu.gcr.io/p/x:1",
            *WHERE,
            "--dry_run",
        ],
    ],
)
def test_a_verb_that_needs_no_network_imports_nothing_heavy(arguments: list[str]) -> None:
    done = run([sys.executable, "-c", LIGHT, *arguments], cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("cl", {"clean"}),
        ("submit l4x4 --recipe=wgan_gp_d", {"wgan_gp_digits"}),
        ("plan --data=x h100x8", {"h100x8"}),
    ],
)
def test_a_shell_completes_verbs_tiers_and_recipes(line: str, words: set[str]) -> None:
    pytest.importorskip(
        "argcomplete", reason="argcomplete, which shells complete by, is not installed"
    )
    line = f"vertex-trainer {line}"
    asked = {
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\v",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " =",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(Path("words").absolute()),
    }
    assert (
        run([sys.executable, "-m", "deploy"], cwd=ROOT, env={**os.environ, **asked}).returncode == 0
    )
    assert {word.strip() for word in Path("words").read_text().split("\v")} == words


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert f"usage: python -m deploy {verb}" in capsys.readouterr().out


def test_a_package_of_the_same_name_in_the_folder_is_told_and_not_used() -> None:
    """As samples of Google's have one. `python -m deploy` imports what is in the folder first, the
    command does not."""
    Path("trainer").mkdir()
    Path("trainer", "__init__.py").touch()
    Path("trainer", "task.py").write_text("raise SystemExit('of another package')")
    console = "import sys; from deploy.__main__ import program; sys.exit(program())"
    for arguments, code, told in (
        (
            ["-P", "-c", console, "train", "--version"],
            0,
            "the package trainer of this folder is not that of",
        ),
        (["-m", "deploy", "--version"], 2, "is not that of vertex-trainer: use the"),
    ):
        done = run([sys.executable, *arguments], env=ENVIRONMENT)
        assert (done.returncode, done.stdout.startswith("vertex-trainer ")) == (code, not code), (
            done.stderr
        )
        assert told in done.stderr


@pytest.mark.parametrize("verb", ["submit", "compare"])
def test_help_shows_the_usual_flags_and_all_when_asked(verb: str, capsys: Capture) -> None:
    for flag, seldom in (("--help", False), ("--help=all", True)):
        with pytest.raises(SystemExit):
            main([verb, flag])
        shown = capsys.readouterr().out
        assert "--bucket" in shown
        assert ("--kms_key" in shown) == seldom
        assert ("--help=all shows" in shown) != seldom


def test_a_setting_may_be_emptied(typed: Command) -> None:
    """An empty value overrides the recipe, which has flip here."""
    flags = ["--recipe=wgan_gp_photos", "--data=digits", "--augment=", "--project=p", *WHERE]
    assert "- --augment=\n" in typed("submit", "--spec", "cpu", *flags)


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (
            PlatformFault("Cloud Storage fails"),
            1,
            "error: Cloud Storage fails: run the same command again later\n",
        ),
        (KeyboardInterrupt(), 75, "stopped: run the same command again to continue\n"),
        (KeyboardInterrupt("projects/p/…/7"), 75, ""),  # the verb has said what became of its job
    ],
)
def test_a_fault_of_the_platform_and_ctrl_c_are_one_line(
    error: BaseException, code: int, shown: str, monkeypatch: Patch, typed: Command
) -> None:
    monkeypatch.setattr("deploy.cli.runs.run_report", Mock(side_effect=error))
    assert typed("report", "run", code=code) == shown


def test_lines_are_written_whole_so_that_those_of_parallel_runs_do_not_mix() -> None:
    stream = Mock(spec=io.StringIO)
    with printed_on(stream):
        say("one", "two")
    written = [call.args[0] for call in stream.write.call_args_list]
    assert [*filter(None, written)] == ["one\ntwo\n"]


# A verb is sent a signal; nohup, say, lets its processes ignore SIGHUP.
SENDS = (
    "signal.signal({0}, signal.SIG_DFL); deploy.cli.machines.main = lambda words:"
    " os.kill(os.getpid(), {0})"
)


@pytest.mark.parametrize(
    ("first", "code", "error"),
    [
        (SENDS.format("signal.SIGTERM"), 75, "stopped: run the same command again to continue\n"),
        (SENDS.format("signal.SIGHUP"), 75, "stopped: run the same command again to continue\n"),
        ("atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))", 0, ""),
    ],
)
def test_signals_interrupt_a_verb_as_ctrl_c_does_and_change_no_exit_code_at_the_end(
    first: str, code: int, error: str
) -> None:
    imports = (
        "import atexit, os, signal, sys, deploy.cli.machines; from deploy.__main__ import program"
    )
    program = f"{imports}; {first}; sys.argv = ['deploy', 'machines']; sys.exit(program())"
    ended = run([sys.executable, "-c", program], env=ENVIRONMENT)
    assert ended.returncode == code
    assert ended.stderr == error


WRITTEN = ["report.html", "table.json", "table.md", "time_and_money.png"]


@pytest.mark.parametrize(
    ("arguments", "code", "written"), [(["machines"], 75, []), (["report", "run"], 75, WRITTEN)]
)
def test_a_reader_that_ends_gets_no_traceback_and_the_files_are_written(
    arguments: list[str], code: int, written: list[str]
) -> None:
    """As `| head -1` does. The output of `machines` exceeds no buffer, so that it breaks when
    Python ends."""
    plant(Path("run"), [0.1] * 4)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "deploy", *arguments]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=120
    )
    os.close(writer)
    assert done.returncode == code
    assert done.stderr == ""
    assert sorted(path.name for path in Path("report").glob("*")) == written
