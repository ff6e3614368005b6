"""Runs the commands of README and docs in order, as a newcomer does, that need neither Google nor a
GPU.

They differ from the pages only by reductions: fewer steps, narrower networks, smaller images and
batches, few examples. What a page runs again into another folder is copied there. test_commands.py
parses every command.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs import pictures
from tests.docs.commands import Command, documented
from tests.docs.sources import ROOT
from tests.docs.stand_ins import code_of_readme, make_stand_ins
from tests.support import of_model

SMALL = ["--width=4", "--latent_dim=8", "--critic_steps=1", "--global_batch_size=4"]
SHORT = ["--steps=20", "--report_every_steps=5"]
OFFLINE = {
    "efficientnet_photos": [
        "--image_size=32",
        "--weights=none",
        "--fine_tune_from=",
        "--fine_tune_after_steps=0",
    ],
    "wgan_gp_photos": ["--image_size=16"],
    "mlp_mnist": ["--data=FOLDER"],
}
LOCAL = (
    "trainer.data.prepare",
    "trainer.task",
    "trainer.launch",
    "trainer.check",
    "trainer.generate",
    "trainer.evaluate",
    "trainer.predict",
    "deploy local",
    "deploy compare",
    "deploy report",
    "deploy plan",
    "deploy machines",
)
# a page may use a run before the command that makes it
FIRST = ("trainer.data.prepare", "trainer.task")
PICTURED = ("runs/digits", "runs/tiers")


def reduced(command: Command) -> list[str]:
    """Returns the command's words with its reductions in place of the same flags."""
    words = [*command.words]
    recipe = next((word.partition("=")[2] for word in words if word.startswith("--recipe=")), "")
    if command.subject == "trainer.data.prepare":
        return [word.replace("--image_size=64", "--image_size=16") for word in words]
    as_it_is = (
        "trainer.launch",
        "trainer.generate",
        "trainer.evaluate",
        "trainer.predict",
        "deploy report",
        "deploy machines",
    )
    of_script = any(word.startswith(("--script=", "--module=")) for word in words)
    if command.subject in as_it_is or "--help" in words or of_script:
        return words
    flags = of_model([*SMALL, *OFFLINE.get(recipe, [])], words)
    given = {word.partition("=")[0] for word in words}
    if "--epochs" in given:  # with --steps too, the length would be set twice
        flags.append("--epochs=1")
    elif command.subject not in ("deploy plan", "trainer.check"):
        flags += SHORT
    if "--repeats" in given:
        flags.append("--repeats=1")
    replaced = {flag.partition("=")[0] for flag in flags}
    return [*(word for word in words if word.partition("=")[0] not in replaced), *flags]


def local_commands() -> list[Command]:
    """Returns the local commands in the order of the pages, but those that make data and runs
    first.

    test_notebook.py runs those of the notebook, tests/test_examples.py those of examples/ that no
    page repeats, tests/deploy/cli/test_submit.py checks devices.
    """
    found = [
        command for command in documented() if not re.search(r"^examples/|\.ipynb$", command.place)
    ]
    found = [
        command
        for command in found
        if command.subject in LOCAL and "--on=vertex" not in command.words
    ]
    # a run, and rows, that the page does not have
    elsewhere = ("gs://", "--on_gpus", " RUN ", "--rows_file")
    found = [
        one for one in found if one.arguments and not any(word in str(one) for word in elsewhere)
    ]
    return sorted(
        found,
        key=lambda command: (
            FIRST.index(command.subject) if command.subject in FIRST else len(FIRST)
        ),
    )


@pytest.mark.slow
def test_every_local_command_of_the_pages_in_order(tmp_path: Path) -> None:
    make_stand_ins(tmp_path)
    (tmp_path / "train.py").write_text(code_of_readme()[0])
    folders = {}
    path = f"{tmp_path}:{ROOT}"
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert {command.subject for command in local_commands()} == set(LOCAL)
    for words, command in {
        tuple(reduced(command)[2:]): command for command in local_commands()
    }.items():
        flags = {word.partition("=")[0] for word in command.words[2:]}
        assert flags <= {word.partition("=")[0] for word in words}, "a flag was dropped"
        place = next(
            (word for word in words if word.startswith(("--job_dir=runs/", "--out=runs/"))), ""
        )
        same = tuple(word for word in words if word != place)
        folder = place.partition("=")[2]
        if folder:
            # of another run that a page puts there
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        if folder and same in folders:
            shutil.copytree(folders[same], tmp_path / folder)
            continue
        folders[same] = tmp_path / folder
        run = [sys.executable, "-m", *words]
        done = subprocess.run(
            run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "Traceback" not in done.stdout + done.stderr
    digits, tiers = (tmp_path / folder for folder in PICTURED)
    pictures.samples(digits, tmp_path / "digits.png")
    pictures.comparison(tiers, tmp_path / "tiers.png")
    for picture in ("digits.png", "tiers.png"):
        assert (tmp_path / picture).stat().st_size < 150_000
