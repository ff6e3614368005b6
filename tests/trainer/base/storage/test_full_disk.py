"""Tests a full disk: one line, exit code 2, the last checkpoint is intact, and the same command
resumes."""

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from keras import callbacks

from tests.fixtures import SLOW, Capture, parametrize
from tests.workers import until
from trainer import task
from trainer.training.checkpoint import checkpoint_folders, read_checkpoint

RUN = [
    "--image_size=16",
    "--width=4",
    "--latent_dim=8",
    "--global_batch_size=8",
    "--critic_steps=2",
    "--steps=40",
    "--steps_per_loop=1",
    "--callbacks=tests.trainer.base.storage.test_full_disk:filling",
]


# the disk, `at_step`, the last checkpoint `saved` before it, and `act`, which fills the disk
PLAN: dict[str, Any] = {}


def act(step: int) -> None:
    """Acts after step `at_step`, or after training for 40, once the checkpoint, written in the
    background, is there."""
    if step == PLAN["at_step"]:
        until((PLAN["disk"] / "job" / "checkpoints" / f"step-{PLAN['saved']:08d}").is_dir)
        PLAN["act"]()


def filling() -> list[callbacks.Callback]:
    return [
        callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: act(min(batch + 1, 39)),
            on_train_end=lambda logs: act(40),
        )
    ]


def fill(disk: Path, room: int) -> None:
    """Leaves `room` bytes free."""
    with open(disk / "ballast", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(max(0, file.tell() // 4096 * 4096 - room))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


CASES = {  # flags, step, last checkpoint, free bytes, the path that cannot be written
    "checkpoint": ("--checkpoint_every_steps=2", 5, 4, 16384, "checkpoints/step-00000006"),
    "sample": (
        "--checkpoint_every_steps=4 --sample_every_steps=5",
        5,
        4,
        0,
        "samples/step-00000005.png",
    ),
    "stats": ("--checkpoint_every_steps=20 --report_every_steps=1", 21, 20, 0, "stats.jsonl"),
    "model": ("--checkpoint_every_steps=10", 40, 40, 16384, "model"),
    "served model": ("--checkpoint_every_steps=10", 40, 40, 240 * 1024, ".model.part/saved_model"),
}


@SLOW
@parametrize("what", CASES)
@pytest.mark.exports
def test_a_full_disk_is_one_line_and_nothing_is_lost(
    disk: Path, capsys: Capture, what: str
) -> None:
    flags, at_step, saved, room, file = CASES[what]
    PLAN.update(disk=disk, at_step=at_step, saved=saved, act=partial(fill, disk, room))
    command = [*RUN, *flags.split(), f"--job_dir={disk / 'job'}"]
    assert task.main(command) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"error: {disk / 'job' / file} cannot be written: No space left on device: "
    )
    assert "free or repair the disk, or use another path, then run the same command again" in told
    assert told.count("\n") == 1
    kept = checkpoint_folders(disk / "job" / "checkpoints")
    assert kept
    for folder in kept:
        read_checkpoint(folder)

    (disk / "ballast").unlink()
    PLAN.update(at_step=0)
    assert task.main(command) == 0
    assert f"resumes at step {int(kept[-1].name[5:])} from" in capsys.readouterr().out
    assert (disk / "job" / "model" / "model.keras").is_file()
