"""Tests that every command of README, docs and examples runs, or is at least accepted by the
program's own parser.

Work that takes minutes, money or the network is cut off by `Cutoff`; other tests cover it.
test_from_the_top.py really runs local commands, with fewer steps. A command that no rule covers
fails.
"""

import contextlib
import functools
import importlib.util
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from deploy.__main__ import main as deploy
from deploy.cli import doctor, jobs, submit
from tests.deploy.emulator import Emulator
from tests.docs.commands import Command, documented
from tests.docs.sources import ROOT
from tests.docs.stand_ins import make_stand_ins
from tests.fixtures import Capture, Patch
from trainer import check, evaluate, generate, launch, plan, predict
from trainer.base.settings.fields import fields_of, flag_name, parse_options
from trainer.base.settings.request import Overrides, first_values, parse_request
from trainer.data import prepare

COMMANDS = documented()

pytestmark = pytest.mark.usefixtures("dist")


class Cutoff(Exception):
    """Signals that the command got as far as the work itself."""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: Patch, cloud: Emulator) -> Path:
    """Provides a folder with small stand-ins for the data of the pages, and gcloud's project and
    region."""
    folder = tmp_path / "work"
    make_stand_ins(folder)
    (folder / "shards").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("CLOUDSDK_AI_REGION", "us-central1")
    return folder


def parse_use_of_a_run(command: Command) -> None:
    """Only parses the flags, because the command needs a trained model, and with it those of the
    data function."""
    kind = (
        evaluate.EvaluateOptions
        if command.subject == "trainer.evaluate"
        else predict.PredictOptions
    )
    functions = Overrides.read(first_values(command.arguments, ("data",))).functions
    assert {flag_name(word) for word in command.arguments} <= {
        "",
        *fields_of(kind),
        *functions.fields,
    }


def dry_run(command: Command) -> None:
    """Runs the command with --dry_run, because it would cost money; with --spec where it would
    upload."""
    arguments = [
        "--spec" if argument.startswith("--out=") else argument for argument in command.arguments
    ]
    assert deploy([command.words[3], "--dry_run", *arguments]) == 0


def run_on_emulator(command: Command) -> None:
    """Runs the command on a job that was submitted to an emulated Vertex AI."""
    verb = command.words[3]
    job = [
        "--recipe=wgan_gp_digits",
        "--image=us-docker.pkg.dev/p/r/x:1",
        "--bucket=gs://bucket",
        "--backend=sdk",
        "--detach",
    ]
    assert submit.main(["cpu", *job]) == 0
    run_verb = getattr(jobs, f"run_{verb}")
    answer = ["--yes"] if verb == "cancel" else []
    assert run_verb([*command.arguments, *answer]) in (0, 75)


def make(command: Command) -> None:
    """Prints what make would do; CI runs lint and the tests."""
    done = subprocess.run(
        ["make", "-n", *command.arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def pip(command: Command) -> None:
    """Compares the extras with setup.py; `make` installs them before the tests."""
    assert command.arguments[0] == "install"
    (what,) = [word for word in command.arguments[1:] if not word.startswith("-")]
    known = set(
        re.findall(r'^ {8}"(\w+)": ', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    )
    name, _, extras = what.rstrip("]").partition("[")
    assert name in (".", "vertex-trainer")
    assert set(extras.split(",")) - {""} <= known


def parse_benchmark(command: Command) -> None:
    """Only parses the flags: a measurement takes minutes on an idle machine, and `make bench` is
    started by hand."""
    module = importlib.import_module(command.subject)
    if hasattr(module, "__path__"):  # a package
        module = importlib.import_module(f"{command.subject}.__main__")
    module.PARSER.parse_args(command.arguments)


def gcloud_knows(command: Command) -> None:
    """Looks the command up in gcloud's own table, because roles and logins cannot be tried without
    an account."""
    node = gcloud_tree()
    words = list(command.arguments)
    while words and words[0] in node["commands"]:
        node = node["commands"][words.pop(0)]
    assert not (node["commands"] and words), f"{words} is not a command of gcloud"
    of_all = {"--project", "--billing-project", "--format"}
    flags = {word.split("=")[0] for word in words if word.startswith("--")} - of_all
    assert flags <= node["flags"].keys()


@functools.cache
def gcloud_tree() -> dict[str, Any]:
    """Returns the table that gcloud uses to complete command lines."""
    found = shutil.which("gcloud")
    table = (
        Path(found).resolve().parents[1] / "data/cli/gcloud_completions.py"
        if found
        else Path("none")
    )
    if not table.is_file():
        pytest.skip("gcloud, or its table of commands, is not installed")
    return dict(runpy.run_path(str(table))["STATIC_COMPLETION_CLI_TREE"])


Rule = Callable[[Command], object]


def ends_well(code: int) -> None:
    assert code == 0


# Verbs that work locally: they run until they call this name, which raises Cutoff.
CUTOFFS = {
    "deploy local": "deploy.cli.local.LocalJob.run",
    "deploy compare": "deploy.comparison.execution.make_writable",
    "deploy plan": "deploy.api.plan.plan_of",
    "deploy prices": "deploy.cli.prices.read_skus",
    "deploy bill": "deploy.cli.bill.find_attempt",
    "deploy clean": "deploy.cli.clean.ThreadPoolExecutor",
    "deploy report": "deploy.cli.runs.write_report",
    "deploy track": "deploy.cli.runs.tracked_runs.track_runs",
    "deploy register": "deploy.cli.runs.read_registration",
    "deploy predict": "deploy.cli.predict.find_version",
}


def module_exists(command: Command) -> None:
    """Checks that the module exists; its own tests run it."""
    assert importlib.util.find_spec(command.words[2])


RULES: Mapping[str, Rule] = {
    # These only parse their flags: they train for a while, or need a trained model.
    "trainer.task": lambda command: Overrides.parse(command.arguments).config,
    "trainer.check": lambda command: parse_request(
        check.CheckOptions, command.arguments, check.USAGE
    ),
    "trainer.launch": lambda command: ends_well(not launch.read_launch(command.arguments)[-1]),
    "trainer.plan": lambda command: parse_request(plan.PlanFlags, command.arguments, plan.USAGE),
    "trainer.generate": lambda command: parse_options(
        generate.GenerateOptions, command.arguments, generate.USAGE
    ),
    "trainer.evaluate": parse_use_of_a_run,
    "trainer.predict": parse_use_of_a_run,
    # These run: on a few images, or without sending anything.
    "trainer.data.prepare": lambda command: ends_well(prepare.main(command.arguments)),
    "deploy machines": lambda command: ends_well(deploy([*command.words[3:]])),
    "deploy doctor": lambda command: ends_well(
        doctor.main([*command.words[4:], "--region=us-central1"]) == 1
    ),
    "deploy submit": dry_run,
    "deploy image": dry_run,
    "deploy watch": run_on_emulator,
    "deploy logs": run_on_emulator,
    "deploy jobs": run_on_emulator,
    "deploy cancel": run_on_emulator,
    "make": make,
    "pip": pip,
    "gcloud": gcloud_knows,
    "pytest": lambda command: ends_well(
        not all((ROOT / word).exists() for word in command.arguments if word.startswith("tests/"))
    ),
    # which is no dependency
    "pre-commit": lambda command: ends_well(command.arguments != ["install"]),
    "docs.pictures": module_exists,
    "docs.run_notebook": module_exists,
    "docs.walks": module_exists,
    "docs.rooms": module_exists,
    "trainer.serve": module_exists,
    "tests.golden": module_exists,
    "examples.optuna_study": module_exists,
}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_documented_command_works(
    command: Command,
    cloud: Emulator,
    flying: Any,
    monkeypatch: Patch,
    capsys: Capture,
) -> None:
    if "--help" in command.words:
        with contextlib.suppress(SystemExit):  # argparse ends the process
            (
                Overrides.parse(command.arguments)
                if command.words[2] == "trainer.task"
                else deploy([*command.words[3:]])
            )
        assert "usage: " in capsys.readouterr().out
    elif command.subject in CUTOFFS:
        monkeypatch.setattr(CUTOFFS[command.subject], Mock(side_effect=Cutoff))
        with pytest.raises(Cutoff):
            deploy(list(command.words[3:]))
    elif command.subject.startswith("benchmarks."):
        parse_benchmark(command)
    elif command.subject.startswith("trainer.") and not command.arguments:  # it is only mentioned
        module_exists(command)
    else:
        flying.asleep = lambda: end_all(cloud)
        RULES[command.subject](command)


def end_all(google: Emulator) -> None:
    """Ends all jobs, so that waiting for them returns at once."""
    for job in google.jobs.values():
        google.begin(job)
        google.end(job, "SUCCEEDED")


def test_make_bench_runs_every_benchmark() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r"^\t\$\(RUN\) (-m benchmarks\..*)$", recipe, re.MULTILINE)
    commands = [Command("Makefile", ("python", *line.split())) for line in found]
    for command in commands:
        parse_benchmark(command)
    modules = (ROOT / "benchmarks").glob("*.py")
    all_of_them = {
        f"benchmarks.{path.stem}" for path in modules if "\nPARSER = " in path.read_text()
    }
    assert {command.subject for command in commands} == all_of_them
